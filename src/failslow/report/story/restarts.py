"""Level S4 in a journal: what was saved, who was left out, when training went on, what Slurm heard.

In: the `action` lines of a restart, from the controller and from the one that followed it:

    {"kind":"action","what":"restart","id":"e1745735301-4","evict":["gpu-3"],"why":"device rank 25"}
    {"kind":"action","what":"restarted","id":"e1745735301-4","starts":1}
    {"kind":"action","what":"slurm","episode":"e1745735301","run":true,"commands":["scontrol …"]}

Out: a `Restart` each, and the commands under their case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from failslow.records import Outcome
from failslow.report import units

__all__ = ["Commands", "Restart", "RestartBook", "commands_text", "restart_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The job was saved, to be started again without some hosts."""

    id: str
    """That of the order."""
    t: float
    """When it was given: the job was saved and had stopped."""
    save_s: float
    """What saving took."""
    evict: tuple[str, ...]
    """Nodes left out."""
    why: str
    starts: int
    """Times the command was started again until training went on; 0 nobody told."""
    back_t: float | None
    """When the first iteration afterwards began; None: none was seen."""

    @property
    def lost_s(self) -> float | None:
        """From the last iteration to the next; None where there is none."""
        return None if self.back_t is None else self.back_t - self.t + self.save_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """What a scheduler was told of a decision, or might be."""

    t: float
    run: bool
    """`failslow run` was to run them; else they were shown."""
    commands: tuple[str, ...]
    error: str = ""
    """Why there are none."""


def restart_text(restart: Restart) -> str:
    """ "restarted without gpu-3 (device rank 25 ×1.84): trains again, 41.2 s lost, 2 starts"."""
    text = f"restarted without {', '.join(restart.evict) or 'anybody'}"
    if restart.why:
        text += f" ({restart.why})"
    if restart.lost_s is None:
        return f"{text}: not seen to train again; its checkpoint is as it was"
    text += f": trains again, {units.duration(restart.lost_s)} lost"
    return f"{text}, {units.plural(restart.starts, 'start')}" if restart.starts > 1 else text


def commands_text(told: Commands) -> str:
    """ "Slurm told: scontrol update …; scontrol requeue 4711"."""
    if told.error:
        return f"Slurm not told: {told.error}"
    return f"{'Slurm told' if told.run else 'to be told Slurm'}: {'; '.join(told.commands)}"


class RestartBook:
    """Collects a journal's."""

    def __init__(self) -> None:
        self._orders: dict[str, tuple[float, tuple[str, ...], str]] = {}
        self._starts: dict[str, int] = {}
        self._commands: dict[str, list[Commands]] = {}

    def take(self, record: Mapping[str, Any], t: float) -> bool:
        """Whether the action line was one of these."""
        what = record.get("what")
        if what == "restart":
            evict = tuple(str(node) for node in record["evict"])
            self._orders[str(record["id"])] = (t, evict, str(record.get("why", "")))
        elif what == "restarted":
            id = str(record["id"])
            self._starts[id] = max(int(record["starts"]), self._starts.get(id, 0))
        elif what == "slurm":
            told = Commands(
                t=t,
                run=bool(record.get("run")),
                commands=tuple(str(command) for command in record["commands"]),
                error=str(record.get("error", "")),
            )
            self._commands.setdefault(str(record["episode"]), []).append(told)
        else:
            return False
        return True

    def commands(self, episode: str) -> list[Commands]:
        """Those about an episode."""
        return self._commands.get(episode, [])

    def restarts(
        self,
        episode: str,
        outcomes: Sequence[tuple[float, Outcome]],
        *,
        started_t: Sequence[float],
        begun_t: NDArray[np.float64],
        ended_t: NDArray[np.float64],
    ) -> list[Restart]:
        """Those for an episode, in order.

        started_t: when watching began anew. begun_t, ended_t: (n,), of the job's iterations.
        """
        found = []
        for id, (t, evict, why) in self._orders.items():
            if id.rpartition("-")[0] != episode:
                continue
            saved = [o for at, o in outcomes if o.level == "S4" and o.ok and at <= t + 1.0]
            # the old workers' last iterations may be told after the order
            anew = [at for at in started_t if at > t]
            later = begun_t[(begun_t > t) & (ended_t > min(anew, default=np.inf))]
            found.append(
                Restart(
                    id=id,
                    t=t,
                    save_s=saved[-1].cost_s if saved else 0.0,
                    evict=evict,
                    why=why,
                    starts=self._starts.get(id, 0),
                    back_t=float(min(later)) if len(later) else None,
                )
            )
        return sorted(found, key=lambda restart: restart.t)
