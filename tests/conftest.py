"""Settings that all tests share."""

from hypothesis import settings

# A stalled machine is no failure of the property: pytest's own time limit bounds a test.
settings.register_profile("failslow", deadline=None)
settings.load_profile("failslow")
