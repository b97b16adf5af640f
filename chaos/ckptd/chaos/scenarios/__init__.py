"""Scenario files of the package, read as data."""
