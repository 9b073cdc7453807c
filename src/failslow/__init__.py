"""failslow: notice that a distributed training job became slow, and who is to blame.

The command line (`failslow --help`) is the main surface. From Python:

>>> import failslow
>>> series = failslow.read_log("train.log")          # doctest: +SKIP
>>> failslow.analyze(series).episodes                # doctest: +SKIP
(Episode(start_step=13800, ..., slowdown=1.19),)
"""

from failslow.errors import FailslowError

__all__ = ["FailslowError", "__version__"]

__version__ = "0.1.0"
