"""failslow: notice that a distributed training job became slow, and who is to blame.

The command line (`failslow --help`) is the main surface. From Python:

>>> import failslow
>>> series = failslow.read_log("train.log")          # doctest: +SKIP
>>> failslow.analyze(series).episodes                # doctest: +SKIP
(Episode(start_step=13800, ..., slowdown=1.19),)
>>> failslow.step(work=65536)                        # in a training loop, once an iteration

Nothing heavy is imported before it is used: this package is loaded into every training process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from failslow.errors import FailslowError

if TYPE_CHECKING:
    from failslow.detect import analyze
    from failslow.ingest import read_log
    from failslow.mitigate.coordinator import Coordinator
    from failslow.trainer import step

__all__ = ["Coordinator", "FailslowError", "__version__", "analyze", "read_log", "step"]

__version__ = "0.1.0"

_HOMES = {
    "Coordinator": "failslow.mitigate.coordinator",
    "analyze": "failslow.detect",
    "read_log": "failslow.ingest",
    "step": "failslow.trainer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'failslow' has no attribute {name!r}")
