"""doctor: whether a job started here would be watched, and whether a running one is.

In: the environment and the machine. Out: `Check`s. `settings` and `machine` only look, `trial`
runs a small job and a message bus, `running` looks at a job that runs.
"""

from __future__ import annotations

from failslow.runtime.doctor.base import Check, Status

__all__ = ["Check", "Status"]
