"""Jobs that never ran, and jobs that ran, run again: the simulator and what-if replay.

In: an `OperationTrace`. Out: a `WhatIf`.

    what_if(read_trace("trace.parquet")).diagnosis     # (WhatIfCause(what="stage imbalance", ...),)
"""

from __future__ import annotations

from failslow.simulate.whatif import what_if

__all__ = ["what_if"]
