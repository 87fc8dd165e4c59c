"""Iterated tasks: applying a step many times."""
