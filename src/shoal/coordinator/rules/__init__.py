"""The rules as pure functions: no clock, no database, no randomness. Tests check the properties of each module."""
