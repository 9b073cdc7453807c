"""Journals of made-up probes, written by the journal's own codec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from failslow.journal import JournalEntry, read_journal
from failslow.journal.codec import encode_entry
from failslow.records import Diagnosis, Episode, Finding, StepSample, Suspect, Verdict

BEGIN_T = 1_745_735_241.0
HEALTHY_S = 0.1


@dataclass
class Made:
    """Lines of a journal, in the order they are added."""

    lines: list[bytes] = field(default_factory=list)
    now_t: float = BEGIN_T
    step: int = 0
    hosts: tuple[str, ...] = ("n0", "n1", "n2", "n3")
    """Of each rank."""
    healthy_s: float = HEALTHY_S
    """What fail-slows are counted from."""

    def add(self, record: Any, kind: str | None = None, **tags: Any) -> None:
        self.lines.append(encode_entry(record, t=self.now_t, kind=kind, **tags))

    def train(self, iterations: int, duration_s: float, *, healthy_s: float = HEALTHY_S) -> None:
        """Iterations, with a little noise that has no chance in it."""
        for _ in range(iterations):
            each_s = duration_s * (1.0 + 0.01 * ((self.step * 7) % 5 - 2))
            self.now_t += each_s
            sample = StepSample(
                step=self.step, duration_s=each_s, end_s=self.now_t - BEGIN_T, calls=3
            )
            self.add(sample, workers=4, healthy_s=healthy_s)
            if self.step % 10 == 0:
                for rank in range(4):
                    self.add(
                        sample, rank=rank, node=self.hosts[rank], healthy_s=healthy_s, state="ok"
                    )
            self.step += 1

    def slow(
        self, iterations: int, slowdown: float, *said: Any, id: str, ends: bool = True
    ) -> None:
        """A fail-slow as the pipeline tells it; said: verdicts and diagnoses on it."""
        begin_t, begin_step = self.now_t, self.step
        each_s = self.healthy_s * slowdown
        self.train(iterations // 2, each_s, healthy_s=self.healthy_s)
        self._episode("onset", id, begin_t, begin_step, slowdown)
        for record in said:
            self.add(record)
        self.train(iterations - iterations // 2, each_s, healthy_s=self.healthy_s)
        self._episode("relief" if ends else "update", id, begin_t, begin_step, slowdown)

    def _episode(self, event: str, id: str, begin_t: float, step: int, slowdown: float) -> None:
        took_s = self.now_t - begin_t
        episode = Episode(
            start_step=step,
            end_step=self.step if event == "relief" else None,
            start_s=begin_t - BEGIN_T,
            end_s=self.now_t - BEGIN_T if event == "relief" else None,
            duration_s=took_s,
            iteration_s=slowdown * self.healthy_s,
            baseline_s=self.healthy_s,
            slowdown=slowdown,
            peak_slowdown=slowdown,
            lost_s=took_s * (1.0 - 1.0 / slowdown),
            confidence=0.999,
        )
        end_t = self.now_t if event == "relief" else None
        self.add(episode, event=event, id=id, start_t=begin_t, end_t=end_t, slowdown_now=slowdown)

    def telemetry(
        self, node: str, series: Mapping[str, Sequence[float | None]], **more: Any
    ) -> None:
        n = max(len(x) for x in series.values())
        body = {
            "node": node,
            "why": "record",
            "t": [self.now_t - n + i for i in range(n)],
            "series": dict(series),
            "steady": {},
            "ranks": {},
            **more,
        }
        self.add(body, kind="telemetry")

    def entries(self, folder: Path) -> Iterator[JournalEntry]:
        path = folder / "journal.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in self.lines))
        return iter(read_journal(path))


def device(rank: int, cause: str = "device degradation (thermal)", **more: Any) -> Finding:
    return Finding(
        what="device",
        slowdown=1.6,
        ranks=(rank,),
        host=f"n{rank}",
        device="NVIDIA H200",
        cause=cause,
        evidence=("For device degradation: heat held the clocks down.",),
        **more,
    )


def link(sender: int, receiver: int, cause: str = "network congestion") -> Finding:
    return Finding(
        what="link",
        slowdown=4.0,
        ranks=(sender,),
        host=f"n{sender}",
        peer_ranks=(receiver,),
        peer_host=f"n{receiver}",
        cause=cause,
    )


def verdict(episode: str, *findings: Finding) -> Verdict:
    return Verdict(episode=episode, findings=findings, pause_s=1.9)


def diagnosis(episode: str, *suspects: Suspect, everyone: bool = False) -> Diagnosis:
    return Diagnosis(episode=episode, suspects=suspects, everyone=everyone, ranks=(0, 1, 2, 3))


def suspect(what: Any, ranks: tuple[int, ...], peers: tuple[int, ...] = ()) -> Suspect:
    return Suspect(what=what, ranks=ranks, peer_ranks=peers, slowdown=1.6, extra_s=0.06, score=0.9)
