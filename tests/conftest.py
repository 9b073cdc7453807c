"""Settings that all tests share."""

import os

from hypothesis import settings

# A stalled machine is no failure of the property: pytest's own time limit bounds a test.
settings.register_profile("failslow", deadline=None)
settings.load_profile("failslow")

# Workers started by a test bring up no agents, unless the test is about them.
os.environ["FAILSLOW_AGENT"] = "0"
