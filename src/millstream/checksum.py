"""CRC-32, by the processor's own means.

Every byte of a journal is checked when it is written, when it is sealed and whenever it is read. The standard
library's does two gigabytes a second, which is a tenth of all the time that a change takes; this one, of the same
polynomial and with the same results, does eight.
"""

from __future__ import annotations

from isal.isal_zlib import crc32

__all__ = ["crc32"]
