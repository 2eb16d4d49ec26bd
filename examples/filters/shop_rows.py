"""Transforms in Python for shop.yaml: from DataFrame to DataFrame, one row of each, or none."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def without_tests(customers: DataFrame) -> DataFrame:
    """Customers that are real, with their names as they should be written."""
    return customers.where("name NOT LIKE 'test %'").withColumn("name", F.initcap("name"))
