"""Millstream: change data capture and replication for databases, columnar, exact, on Apache Spark."""

__version__ = "0.1.0"
