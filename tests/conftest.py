"""Settings of the whole suite: properties are tried on the same examples each time, however busy the machine is."""

from hypothesis import settings

settings.register_profile("shoal", deadline=None, derandomize=True)
settings.load_profile("shoal")
