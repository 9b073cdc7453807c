"""Real faults on real watched jobs: is the right culprit proved, how soon, at what pause?

    python -m benchmarks.localize [--rounds 4] [--layouts dp4,pp2dp2,tp2dp2] [--json]

`examples/hybrid_gpt` (gloo) on four nodes of the test bed (network namespaces, root needed), mode
advise, reference on. In each round every fault of the list strikes once, in random order and
places; labelled by what was injected: a CPU quota is a slow device, a burner beside the worker
contention on its host. Right is what names exactly the injected component and kind; where a fault
changes iteration times by less than 10 % (15 % if unnoticed) nobody needs to be named. Off the
ring's path is one: gloo's ring sends from r to r − 1.

    dp4  throttle rank 2  x1.91  verdict 6.1 s after onset, pause 1.9 s: device rank 2 (right)
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from tests.testbed import TestBed, until

from failslow.errors import InjectError
from failslow.inject import burn, congest, flood, throttle
from failslow.journal import GrowingJournal, JournalEntry
from failslow.records import Finding, Verdict

__all__ = ["FAULTS", "LAYOUTS", "Strike", "WatchedLayout", "main"]

_TRAIN = Path(__file__).parents[1] / "examples/hybrid_gpt/train.py"
LAYOUTS = {
    "dp4": ("--dp", "4", "--micro-batches", "16"),
    "pp2dp2": ("--pp", "2", "--dp", "2", "--micro-batches", "8"),
    "tp2dp2": ("--tp", "2", "--dp", "2", "--micro-batches", "4"),
}
FAULTS = ("throttle", "burner", "link", "egress", "flood", "two", "off path", "nothing")
_MATTERS, _PLAIN = 1.10, 1.15
"""Between the two, whether it is noticed is a matter of noise: naming nobody is right as well."""
_HEALTHY_S = 4.0
_FELT_S = 10.0
"""What has neither slowed training nor been noticed after so long is not waited for."""
EGRESS_MBIT = 500.0
"""What a node may send, as its network card would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What was injected."""

    text: str
    devices: frozenset[int] = frozenset()
    hosts: frozenset[int] = frozenset()
    links: frozenset[tuple[int, int]] = frozenset()
    """Directed, by rank (a node has one)."""
    senders: frozenset[int] = frozenset()
    """All that these send."""

    def right(self, findings: Sequence[Finding]) -> bool:
        """Whether they name exactly this."""
        devices = {r for f in findings if f.what == "device" for r in f.ranks}
        hosts = {r for f in findings if f.what == "host" for r in f.ranks}
        links = [f for f in findings if f.what == "link"]
        if devices != self.devices or hosts != self.hosts:
            return False
        named = {self._of(finding) for finding in links}
        return len(named) == len(links) and named == self.links | {(r, -1) for r in self.senders}

    def _of(self, finding: Finding) -> tuple[int, int]:
        a = finding.ranks[0] if len(finding.ranks) == 1 else -1
        b = finding.peer_ranks[0] if len(finding.peer_ranks) == 1 else -1
        return a, b


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One injection and what was said of it."""

    layout: str
    fault: str
    truth: str
    slowdown: float
    """Median iteration under the fault over the median before, by the trainer's own clock."""
    named: tuple[str, ...]
    causes: tuple[str, ...]
    right: bool
    confirmed: bool
    verdict_s: float | None
    """From the journal's onset (when it was confirmed) to the verdict; None: none."""
    since_bite_s: float | None
    """From the injection to the verdict."""
    pause_s: float | None

    @property
    def felt(self) -> bool:
        """Training is so slow, or was found to be, that somebody has to be named."""
        return _is_felt(self.slowdown, self.confirmed)


def _is_felt(slowdown: float, confirmed: bool) -> bool:
    return slowdown >= (_MATTERS if confirmed else _PLAIN)


class WatchedLayout:
    """A job in the test bed, and what its journal says."""

    def __init__(self, bed: TestBed, folder: Path, layout: str, *, mode: str = "advise") -> None:
        self.bed, self.layout = bed, layout
        # read line by line as it grows: reading it again and again would be a load by itself
        self._journal = GrowingJournal(folder / "run" / "journal.jsonl")
        self.workers = bed.launch(
            _TRAIN,
            args=[*LAYOUTS[layout], "--steps", "1000000", "--width", "96", "--layers", "2",
                  "--work-ms", "15", "--dilute", "4",
                  "--sequences", "1", "--length", "32"],
            env={
                "FAILSLOW": "1",
                "FAILSLOW_MODE": mode,
                "FAILSLOW_DIR": str(folder / "run"),
                "FAILSLOW_DETECT_MIN_DURATION_S": "2",
                "FAILSLOW_LOCALIZE_PAUSES_PER_HOUR": "100000",
                "FAILSLOW_LOCALIZE_MAX_PAUSE_SHARE": "1",
            },
            cores=[0, 1],
        )  # fmt: skip
        self.places = {node.index: node for node in bed.nodes}

    def entries(self, *kinds: str) -> list[JournalEntry]:
        """Of these kinds, oldest first."""
        self._journal.refresh()
        return [entry for entry in self._journal.entries if entry.kind in kinds]

    def steps_s(self, since_t: float) -> list[float]:
        """The job's iterations that ended later."""
        return [
            e.record.duration_s for e in self.entries("step") if e.rank is None and e.t > since_t
        ]

    def ready(self, limit_s: float = 90.0) -> None:
        """The reference is there."""
        until(
            lambda: any(_of(e, "why") == "reference" for e in self.entries("validation")), limit_s
        )

    def onset(self, since_t: float) -> JournalEntry | None:
        """The first episode that began later."""
        found = (e for e in self.entries("episode") if e.tags.get("event") == "onset")
        return next((e for e in found if e.t > since_t), None)

    def verdict(self, since_t: float) -> JournalEntry | None:
        """The first verdict on an episode given later that names something, else the first."""
        found = [
            entry
            for entry in self.entries("verdict")
            if isinstance(entry.record, Verdict) and entry.t > since_t and entry.record.episode
        ]
        return next((e for e in found if e.record.findings), found[0] if found else None)

    def calm(self, since_t: float) -> bool:
        """No suspicion, no episode on."""
        on = ""
        for entry in self.entries("suspicion", "episode"):
            event = _of(entry, "event") or str(entry.tags.get("event", ""))
            on = "" if event in ("cleared", "relief", "abandoned") else event
        return on == "" and len(self.steps_s(since_t)) > 20


class Demand:
    """What training takes of this machine: counted from construction to `take`."""

    def __init__(self, job: WatchedLayout) -> None:
        self._processes = [psutil.Process(worker.pid) for worker in job.workers]
        self._since_s, self._before = time.monotonic(), self._count()

    def take(self) -> tuple[list[float], list[float]]:
        """By rank: (cores its process had, bits per second its node sent)."""
        took_s = time.monotonic() - self._since_s
        now = self._count()
        each = [
            ((a - b) / took_s, 8.0 * (c - d) / took_s)
            for (a, c), (b, d) in zip(now, self._before, strict=True)
        ]
        return [cores for cores, _ in each], [bits for _, bits in each]

    def _count(self) -> list[tuple[float, int]]:
        return [(sum(p.cpu_times()[:2]), _sent_bytes(p.pid)) for p in self._processes]


def _sent_bytes(pid: int) -> int:
    """By the interface eth0 of the process's network namespace."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    (words,) = (line.split() for line in lines if line.strip().startswith("eth0:"))
    return int(words[9])


def _of(entry: JournalEntry, key: str) -> str:
    return str(entry.record.get(key, "")) if isinstance(entry.record, dict) else ""


def _fault(
    job: WatchedLayout, name: str, rank: int, demand: Demand
) -> tuple[Truth, Callable[[], AbstractContextManager[object]]]:
    """What is injected and how: about half of what training needs is left to it."""
    cores, bits_per_s = demand.take()
    node = job.places
    onwards, back, opposite = (rank - 1) % 4, (rank + 1) % 4, (rank + 2) % 4

    def slowed(rank: int) -> AbstractContextManager[object]:
        return throttle(job.workers[rank].pid, to=max(0.03, 0.5 * cores[rank]))

    def congested(sink: int | None) -> AbstractContextManager[object]:
        dst = None if sink is None else node[sink].address
        # what an iteration sends then takes as long as the iteration did
        return congest(node[rank].namespace, "eth0", bits_per_s[rank] / 1e6, dst=dst)

    def burning() -> AbstractContextManager[object]:
        # on its core, each as heavy as it: of what the core's other worker leaves to its group, it
        # gets one share in load + 1
        load = (1.0 - cores[opposite]) / (0.5 * cores[rank]) - 1.0
        return burn([rank % 2], load=max(1.0, load), beside=job.workers[rank].pid)

    def flooded() -> AbstractContextManager[object]:
        sinks = [n.namespace for index, n in node.items() if index != rank]
        # paced: it leaves room for what an iteration sends in the time the iteration took, and
        # costs the two cores little
        each_mbit = max(0.1 * EGRESS_MBIT, EGRESS_MBIT - bits_per_s[rank] / 1e6) / len(sinks)
        return _both(
            *(
                flood(node[rank].namespace, sink, rate_mbit=each_mbit, streams=2, protocol="udp")
                for sink in sinks
            )
        )

    both = frozenset({rank, opposite})
    one = frozenset({rank})
    faults: dict[str, tuple[Truth, Callable[[], AbstractContextManager[object]]]] = {
        "throttle": (Truth(text=f"device {rank}", devices=one), lambda: slowed(rank)),
        "burner": (Truth(text=f"host {rank}", hosts=one), burning),
        "link": (
            Truth(text=f"link {rank}>{onwards}", links=frozenset({(rank, onwards)})),
            lambda: congested(onwards),
        ),
        "off path": (
            Truth(text=f"link {rank}>{back}", links=frozenset({(rank, back)})),
            lambda: congested(back),
        ),
        "egress": (Truth(text=f"all {rank} sends", senders=one), lambda: congested(None)),
        "flood": (Truth(text=f"all {rank} sends", senders=one), flooded),
        "two": (
            Truth(text=f"devices {rank}, {opposite}", devices=both),
            lambda: _both(slowed(rank), slowed(opposite)),
        ),
        "nothing": (Truth(text="nothing"), ExitStack),
    }
    return faults[name]


@contextmanager
def _both(*faults: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        yield


def strike(job: WatchedLayout, name: str, rank: int, *, limit_s: float = 40.0) -> Strike:
    """Once all is calm: healthy for a while, then the fault at this rank until the verdict."""
    before_t = time.time()
    until(lambda: job.steps_s(before_t), 60.0)  # it may have begun under the last fault
    healthy_t, demand = time.time(), Demand(job)
    until(lambda: time.time() - healthy_t > _HEALTHY_S and job.calm(healthy_t), 180.0)
    healthy_s = statistics.median(job.steps_s(healthy_t))
    truth, inject = _fault(job, name, rank, demand)
    with inject():
        began_t = time.time()
        _reached(
            lambda: _names(job.verdict(began_t)) or _is_over(job, began_t, healthy_s),
            _FELT_S if name == "nothing" else limit_s,
        )
        slow = job.steps_s(began_t + 0.5)
    onset, verdict = job.onset(began_t), job.verdict(began_t)
    slowdown = statistics.median(slow) / healthy_s if slow else 1.0
    findings = verdict.record.findings if verdict else ()
    expected = truth if slowdown >= _MATTERS or onset else Truth(text="nothing")
    right = expected.right(findings)
    if not _is_felt(slowdown, onset is not None):
        right |= not findings
    return Strike(
        layout=job.layout,
        fault=name,
        truth=truth.text,
        slowdown=slowdown,
        named=tuple(finding.key for finding in findings),
        causes=tuple(finding.cause for finding in findings),
        right=right,
        confirmed=onset is not None,
        verdict_s=verdict.t - onset.t if findings and onset and verdict else None,
        since_bite_s=verdict.t - began_t if verdict else None,
        pause_s=verdict.record.pause_s if verdict else None,
    )


def _is_over(job: WatchedLayout, began_t: float, healthy_s: float) -> bool:
    """Neither was the fault noticed by now, nor does training feel it."""
    if time.time() - began_t < _FELT_S or job.onset(began_t):
        return False
    slow = job.steps_s(began_t + 0.5)
    return bool(slow) and statistics.median(slow) < _MATTERS * healthy_s


def _names(verdict: JournalEntry | None) -> bool:
    return verdict is not None and bool(verdict.record.findings)


def _reached(condition: Callable[[], object], limit_s: float) -> bool:
    try:
        until(condition, limit_s)
    except AssertionError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Strike and print; 0 when at least 95 % were right and no pause was too long."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder to leave the journals in")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    why = TestBed.available()
    if why is not None:
        print(f"localize: {why}", file=sys.stderr)
        return 1
    if options.keep is not None and any(options.keep.glob("*/run")):
        print(f"localize: {options.keep} holds an earlier run; name a new folder", file=sys.stderr)
        return 1
    console, pick = Console(stderr=True), random.Random(options.seed)
    faults = options.faults.split(",")
    strikes: list[Strike] = []
    for layout in options.layouts.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = (options.keep or Path(scratch)) / layout
            folder.mkdir(parents=True, exist_ok=True)
            with TestBed(nodes=4, egress_mbit=EGRESS_MBIT, folder=folder) as bed:
                job = WatchedLayout(bed, folder, layout)
                job.ready()
                for _ in range(options.rounds):
                    for fault in pick.sample(
                        options.faults.split(","), options.faults.count(",") + 1
                    ):
                        try:
                            strikes.append(strike(job, fault, pick.randrange(4)))
                        except InjectError as error:  # nothing was injected: nothing to judge
                            console.print(f"{layout}  {fault} could not be injected: {error}")
                            continue
                        console.print(_line(strikes[-1]))
    if options.json:
        print(json.dumps([asdict(s) for s in strikes], indent=2))
    right = sum(s.right for s in strikes) / len(strikes)
    delays = [s.verdict_s for s in strikes if s.verdict_s is not None]
    pauses = [s.pause_s for s in strikes if s.pause_s is not None]
    table = Table("fault", "right", "of")
    for fault in faults:
        own = [s for s in strikes if s.fault == fault]
        table.add_row(fault, str(sum(s.right for s in own)), str(len(own)))
    console.print(table)
    console.print(
        f"{100 * right:.1f} % of {len(strikes)} right; onset to verdict "
        f"{statistics.median(delays or [0]):.1f} s median, {max(delays or [0]):.1f} s at most; "
        f"pause {statistics.median(pauses or [0]):.2f} s median, {max(pauses or [0]):.2f} s at most"
    )
    return 0 if right >= 0.95 and max(pauses or [0]) <= 5.0 else 1


def _line(s: Strike) -> str:
    said = ", ".join(f"{n} ({c or 'no cause'})" for n, c in zip(s.named, s.causes, strict=True))
    when = (
        "no verdict"
        if s.verdict_s is None
        else (f"verdict {s.verdict_s:.1f} s after onset, pause {s.pause_s:.1f} s")
    )
    mark = "[green]right[/green]" if s.right else "[red]WRONG[/red]"
    return f"{s.layout}  {s.fault} {s.truth}  x{s.slowdown:.2f}  {when}: {said or '–'}  {mark}"


if __name__ == "__main__":
    sys.exit(main())
