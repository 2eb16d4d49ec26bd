"""`python -m millstream` is the command `millstream`."""

from millstream.cli import main

main()
