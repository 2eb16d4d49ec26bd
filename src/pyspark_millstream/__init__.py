"""Where Spark finds the format `millstream` by itself, without a register call.

At the first use of a Python data source Spark imports every package on the Python path whose name
begins with `pyspark_` and takes its `DefaultSource`. A package that fails there makes Spark skip
them all, its neighbours included: so nothing is imported here but the shell of the format.
"""

from millstream.spark.format import ChangesSource as DefaultSource

__all__ = ["DefaultSource"]
