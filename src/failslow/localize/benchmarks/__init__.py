"""What a paused worker measures: matrix products, its host, and links to other workers.

In: a script of `localize.script`. Out: a list of results for `localize.judge`. Needs torch.

    run_script(script, rank=5, world_size=8, device="cuda:5", name="pause-7")
"""

from __future__ import annotations

from failslow.localize.benchmarks.place import describe_place
from failslow.localize.benchmarks.run import run_script

__all__ = ["describe_place", "run_script"]
