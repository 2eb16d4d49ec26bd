"""Stream files: YAML in, streams out, or every problem with its place. No Spark in here."""

from millstream.config.load import load_streams
from millstream.config.problems import Problem, StreamFileError

__all__ = ["Problem", "StreamFileError", "load_streams"]
