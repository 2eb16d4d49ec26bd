"""A source for tests: what it does is written by the test. `millstream.testing` is its public face."""
