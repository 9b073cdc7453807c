"""Writes journals line by line as a controller does, for samples. No test itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from failslow.journal import encode_entry
from failslow.records import CallCell, Culprit, Episode, Level, RankProfile, StepSample

__all__ = ["BEGUN", "MB", "Script", "cell", "window", "write"]

BEGUN = 1_745_735_250.0
MB = 1 << 20


class Script:
    """A journal, line by line, of `ranks` workers of which `per_node` share a node."""

    def __init__(self, ranks: int, per_node: int, healthy_s: float, seed: int = 0) -> None:
        self.t = BEGUN
        self.step = 0
        self.lines: list[bytes] = []
        self.ranks, self.per_node, self.healthy_s = ranks, per_node, healthy_s
        self._random = np.random.default_rng(seed)
        self._due_t = BEGUN
        self.health("controller", event="started", launch="1-2", message="watching begins")
        for node in range(-(-ranks // per_node)):
            own = [r for r in range(ranks) if r // per_node == node]
            name = self.node(own[0])
            self.health("agent", node=name, ranks=own, message=f"node {name} is watched")

    def node(self, rank: int) -> str:
        return f"gpu-{rank // self.per_node}"

    def write(self, record: Any, *, t: float | None = None, **tags: Any) -> None:
        self.lines.append(encode_entry(record, t=self.t if t is None else t, **tags))

    def health(self, what: str, ok: bool = True, **more: Any) -> None:
        self.write({"what": what, "ok": ok, "message": what, **more}, kind="health")

    def steps(
        self,
        count: int,
        ratio: float = 1.0,
        *,
        slow: Mapping[int, float] | None = None,
        spikes: Sequence[int] = (),
        interval_s: float = 1.0,
    ) -> None:
        """Iterations at `ratio` times healthy; `slow` ranks' own time is that much longer."""
        for at in range(count):
            noise = float(np.exp(0.02 * self._random.standard_normal()))
            duration_s = self.healthy_s * ratio * noise * (12.0 if at in spikes else 1.0)
            self.t += duration_s
            sample = StepSample(
                step=self.step,
                duration_s=duration_s,
                end_s=self.t - BEGUN,
                foreign_calls=int(at in spikes),
                calls=24,
            )
            self.write(sample, workers=self.ranks, healthy_s=self.healthy_s)
            self.step += 1
            if self.t >= self._due_t:
                self._due_t = self.t + interval_s
                self._workers(duration_s, interval_s, slow or {})

    def _workers(self, duration_s: float, interval_s: float, slow: Mapping[int, float]) -> None:
        noise = np.exp(0.02 * self._random.standard_normal(self.ranks))
        for rank in range(self.ranks):
            own_s = 0.7 * self.healthy_s * slow.get(rank, 1.0) * float(noise[rank])
            sample = StepSample(
                step=self.step - 1,
                duration_s=duration_s,
                end_s=self.t - BEGUN,
                iterations=max(1, round(interval_s / duration_s)),
                compute_s=own_s,
                calls=24,
            )
            self.write(
                sample,
                rank=rank,
                node=self.node(rank),
                worker=f"{4000 + rank}-991",
                healthy_s=self.healthy_s,
                state="slow" if rank in slow else "ok",
            )

    def suspicion(
        self, id: str, ratio: float, *culprits: Culprit, event: str = "suspected"
    ) -> None:
        record = {
            "event": event,
            "id": id,
            "step": self.step,
            "first_step": self.step - 5,
            "first_t": self.t - 5 * self.healthy_s * ratio,
            "slowdown": ratio,
            "baseline_s": self.healthy_s,
            "culprits": list(culprits),
        }
        self.write(record, kind="suspicion")

    def pause(self, episode: str, results: list[dict[str, Any]], pause_s: float) -> int:
        """Training stands still at the last iteration's end; returns its step."""
        self.t += pause_s
        record = {
            "episode": episode,
            "why": "suspects" if episode else "reference",
            "ok": True,
            "reason": "",
            "step": self.step - 1,
            "pause_s": pause_s,
            "results": results,
        }
        self.write(record, kind="validation")
        return self.step - 1

    def profiles(
        self, episode: str, cells: Callable[[int], Sequence[CallCell]], own_s: Any
    ) -> None:
        """A round of profiles for an episode, "" in healthy times.

        own_s: of each rank, its own seconds in an iteration.
        """
        for rank in range(self.ranks):
            profile = RankProfile(
                rank=rank,
                node=self.node(rank),
                host=f"boot-{rank // self.per_node}",
                device="NVIDIA H200",
                start_t=self.t - 3.0,
                end_t=self.t,
                iterations=30,
                iteration_s=self.healthy_s,
                compute_s=own_s(rank) * float(np.exp(0.01 * self._random.standard_normal())),
                cells=tuple(cells(rank)),
            )
            self.write(profile, episode=episode)

    def episode(
        self,
        id: str,
        event: str,
        *,
        start: tuple[int, float],
        levels: Sequence[tuple[int, float]],
        lost_s: float,
        culprits: tuple[Culprit, ...] = (),
        end: tuple[int, float] | None = None,
        **changes: Any,
    ) -> None:
        """`start` and `end`: (step, epoch seconds)."""
        over = end is not None
        ratio = max(ratio for _, ratio in levels)
        start_s = start[1] - BEGUN
        end_s = None if end is None else end[1] - BEGUN
        fields: dict[str, Any] = {
            "start_step": start[0],
            "end_step": None if end is None else end[0],
            "start_s": start_s,
            "end_s": end_s,
            "duration_s": (self.t - BEGUN if end_s is None else end_s) - start_s,
            "iteration_s": ratio * self.healthy_s,
            "baseline_s": self.healthy_s,
            "slowdown": ratio,
            "peak_slowdown": 1.04 * ratio,
            "lost_s": lost_s,
            "confidence": 0.998,
            "culprits": culprits,
            "levels": tuple(Level(start_step=s, slowdown=r) for s, r in levels),
        }
        self.write(
            Episode(**(fields | changes)),
            event=event,
            id=id,
            start_t=start[1],
            end_t=None if end is None else end[1],
            slowdown_now=1.0 if over else levels[-1][1],
        )

    def finish(self) -> Script:
        self.health("controller", event="ended", message="the job has ended")
        return self


def cell(
    group: Sequence[int], label: str, op: str, size_bytes: int, *, position: int = 0, **times: Any
) -> CallCell:
    """One call of a profile."""
    fields: dict[str, Any] = {"calls": 30, "duration_s": None, "peer": None} | times
    return CallCell(
        group=tuple(group), label=label, op=op, size_bytes=size_bytes, position=position, **fields
    )


def window(
    node: str, *, since_t: float, until_t: float, onset_t: float, moved: Mapping[str, Any]
) -> dict[str, Any]:
    """A node's telemetry; `moved`: by series (before, during), or by rank the same."""
    t = np.arange(since_t, until_t, 1.0)
    wave = np.sin(np.arange(len(t)) * 1.7)

    def values(before: float, during: float) -> list[float]:
        level = np.where(t < onset_t, before, during)
        return [round(float(v), 6) for v in level * (1 + 0.03 * wave)]

    def holder(named: Mapping[str, Any]) -> dict[str, Any]:
        return {"series": {name: values(*pair) for name, pair in named.items()}, "steady": {}}

    ranks = {name: holder(own) for name, own in moved.items() if isinstance(own, Mapping)}
    own = {name: pair for name, pair in moved.items() if not isinstance(pair, Mapping)}
    return {
        "node": node,
        "since_t": since_t,
        "until_t": until_t,
        "interval_s": 1.0,
        "t": t.tolist(),
        **holder(own),
        "steady": {"cpu/steal_share": 0.0},
        "ranks": ranks,
        "missing": [],
    }


def write(script: Script, folder: Path) -> Path:
    """The journal of `script` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "journal.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in script.lines))
    return path
