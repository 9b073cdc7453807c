"""A campaign of real probes with real faults in a third of them: does its study tell the truth?

    python -m benchmarks.probe_campaign STORE [--probes 1x10 --probes 4x20] [--seed 1] [--json]

Four nodes of the test bed (network namespaces, root needed), four workers a probe: all on one node,
or one on each. A third of the probes is struck once by what chance has chosen: a worker throttled
by half, a congested link (40 of 1,000 Mbit/s, one direction, of the gradients' ring), or all that a
node sends congested. Right is a healthy probe found healthy, or a struck one found slow by the
injected cause; whether the node at fault is named is counted beside. A probe takes a minute or so;
interrupted (Ctrl-C, or `--most N` probes a run), the same command goes on from its store.

    4n-0002  link rank 3>2  found ×1.8 network congestion: link node3>node2  right
    30 probes: 30 right (100.0 %), node named in 10 of 10; the table equals the truth
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.probe.probing import Probe
from tests.testbed import Node, TestBed

from failslow.cli.campaign import ended_text
from failslow.cli.output import emit_view
from failslow.errors import InjectError
from failslow.inject import Injection, congest, throttle
from failslow.probe.campaign import Campaign, CampaignPlan, SizeClass, Start, Step, Tally
from failslow.probe.executors import LocalExecutor, Seat
from failslow.probe.result import ProbeSpec, command
from failslow.probe.runner import Audience, CampaignStop, TrainingJob, run_campaign
from failslow.probe.store import ProbeRecord, StoreWriter, read_store
from failslow.probe.study import ProbeStudy, StudyJob, study_probes
from failslow.report.probestudy import probe_study_view

__all__ = ["BedJob", "Striker", "Truth", "main", "truths"]

_NODES, _WORKERS = 4, 4
_HEALTHY_MBIT, _CONGESTED_MBIT = 1000.0, 40
_LEAST_ITERATIONS = 40
_GOAL_PCT = 95.0
# the ring of a replica pair's gradients, both ways: ranks 0, 1 and 2, 3 (pipeline 2 x data 2)
_LINKS = ((0, 1), (1, 0), (2, 3), (3, 2))
_CAUSES = {
    "throttle": "device degradation",
    "link": "network congestion",
    "egress": "network congestion",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BedJob(TrainingJob):
    """As many workers a probe on one node as on four: they share two cores."""

    def spec(self, campaign: str, start: Start) -> ProbeSpec:
        """Of one attempt."""
        spec = TrainingJob.spec(self, campaign, start)
        return replace(spec, workers_per_node=max(1, _WORKERS // start.size.nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a probe is struck by."""

    kind: str
    """throttle, link, egress; "" nothing."""
    rank: int = 0
    """Throttled, or of the node that sends."""
    peer: int = 0
    """Of a link's receiving side."""

    @property
    def cause(self) -> str:
        """As the study should name it."""
        return _CAUSES.get(self.kind, "")

    @property
    def text(self) -> str:
        """For people."""
        if self.kind == "throttle":
            return f"throttle rank {self.rank}"
        if self.kind == "link":
            return f"link rank {self.rank}>{self.peer}"
        return f"all rank {self.rank} sends" if self.kind else "nothing"

    def node(self, nodes: Sequence[str]) -> str:
        """The one at fault, of the probe's nodes."""
        return nodes[self.rank] if len(nodes) > 1 else nodes[0]


def truths(plan: CampaignPlan, seed: int) -> dict[str, Truth]:
    """A fault for a third of the probes of each size, the same for the same seed."""
    found = dict.fromkeys(plan.probes(), Truth(kind=""))
    for size in plan.sizes:
        pick = random.Random(f"{seed}-{size.name}")
        names = [name for name, its in plan.probes().items() if its == size]
        kinds = ["throttle", "link", "egress"] if size.nodes > 1 else ["throttle"]
        first = pick.randrange(len(kinds))
        for number, name in enumerate(pick.sample(names, round(len(names) / 3))):
            kind = kinds[(first + number) % len(kinds)]
            rank, peer = pick.choice(_LINKS)
            found[name] = Truth(kind=kind, rank=rank, peer=peer)
    return found


class Striker(Audience):
    """Strikes each probe once, as its truth says; tells what it does on stderr."""

    def __init__(
        self,
        bed: TestBed,
        folder: Callable[[str, int], Path],
        told: dict[str, Truth],
        *,
        after_s: float,
        hold_s: float,
        stop: CampaignStop,
        most: int | None,
        keep: Path | None,
    ) -> None:
        """folder: of an attempt. after_s: of healthy iterations, at least. keep: for journals."""
        self._bed, self._folder, self._told = bed, folder, told
        self._after_s, self._hold_s = after_s, hold_s
        self._stop, self._left, self._keep = stop, most, keep
        self.struck: dict[str, float] = {}
        """Seconds that the fault of each attempt was in force."""
        self._name = ""
        self._probe = Probe(Path())
        self._truth = Truth(kind="")
        self._trained_s: float | None = None
        self._faults = ExitStack()
        self._since_s: float | None = None

    def started(self, start: Start, _tally: Tally) -> None:
        """Look at the new one."""
        self._name = f"{start.probe}.{start.attempt}"
        self._probe = Probe(self._folder(start.probe, start.attempt))
        self._truth = self._told[start.probe]
        self._trained_s = self._since_s = None

    def looked(self, _tally: Tally, *, queued: int, step: Step) -> None:
        """Strike when it has trained for long enough; undo it when the time is over."""
        del queued, step
        now_s = time.monotonic()
        if self._since_s is not None:
            if now_s - self._since_s > self._hold_s:
                self._undo()
            return
        if not self._truth.kind or self._name in self.struck:
            return
        if self._trained_s is None:
            if self._probe.iterations() >= 1:
                self._trained_s = now_s
            return
        trained_s = now_s - self._trained_s
        healthy = self._probe.iterations() >= _LEAST_ITERATIONS and trained_s > self._after_s
        # what healthy workers do in benchmarks is measured at the start, if nothing disturbs it
        if healthy and (self._has_reference() or trained_s > 1.5 * self._after_s):
            self._strike()

    def ended(self, record: ProbeRecord, tally: Tally) -> None:
        """Undo what is still on."""
        self._undo()
        held = self.struck.get(f"{record.probe}.{record.attempt}", 0.0)
        _say(f"{ended_text(record)}   [{self._told[record.probe].text}, {held:.0f} s]")
        if self._left is not None:
            self._left -= 1
            if self._left <= 0 and tally.left:
                self._stop.now()

    def _has_reference(self) -> bool:
        records = (entry.record for entry in self._probe.entries("validation"))
        return any(isinstance(r, dict) and r.get("why") == "reference" for r in records)

    def _strike(self) -> None:
        try:
            self._faults.enter_context(self._fault())
        except (InjectError, AssertionError) as error:
            _say(f"{self._name}: not struck: {error}")
            self.struck[self._name] = 0.0
            return
        self._since_s = time.monotonic()

    def _undo(self) -> None:
        if self._since_s is not None:
            self._faults.close()
            self.struck[self._name] = time.monotonic() - self._since_s
            self._since_s = None
            if self._keep is not None:  # of a probe that is found healthy nothing is left
                self._keep.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):
                    shutil.copy(self._probe.folder / "run/journal.jsonl", self._keep / self._name)

    def _fault(self) -> Injection:
        truth = self._truth
        if truth.kind == "throttle":
            return throttle(self._probe.pid(truth.rank), to=0.5, method="signal")
        to = self._bed_node(truth.peer).address if truth.kind == "link" else None
        return congest(self._bed_node(truth.rank).namespace, "eth0", _CONGESTED_MBIT, dst=to)

    def _bed_node(self, rank: int) -> Node:
        """Where a worker of this probe is: each probe is placed anew."""
        own = Path(f"/proc/{self._probe.pid(rank)}/ns/net").stat().st_ino
        return next(
            n for n in self._bed.nodes if Path("/run/netns", n.namespace).stat().st_ino == own
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One probe against its truth."""

    probe: str
    truth: str
    found: str
    right: bool
    node_named: bool | None
    """None: nothing was injected."""


def score(study: ProbeStudy, told: dict[str, Truth]) -> list[Scored]:
    """Every probe that measured."""
    return [_scored(job, told[job.probe]) for job in study.jobs if not job.partial]


def _scored(job: StudyJob, truth: Truth) -> Scored:
    result = job.result
    found = "healthy"
    if job.hit:
        who = ", ".join(result.culprits) or "nobody named"
        found = f"×{result.slowdown:.2f} {job.cause}: {who}"
    return Scored(
        probe=job.probe,
        truth=truth.text,
        found=found,
        right=job.hit == bool(truth.kind) and (not job.hit or job.cause == truth.cause),
        node_named=truth.node(result.nodes) in result.culprit_nodes if truth.kind else None,
    )


def expected_table(plan: CampaignPlan, told: dict[str, Truth]) -> dict[int, dict[str, int]]:
    """By number of nodes: how many probes each cause hits."""
    table: dict[int, Counter[str]] = {size.nodes: Counter() for size in plan.sizes}
    for name, size in plan.probes().items():
        if told[name].kind:
            table[size.nodes][told[name].cause] += 1
    return {nodes: dict(causes) for nodes, causes in table.items()}


def _campaign(options: argparse.Namespace, plan: CampaignPlan, told: dict[str, Truth]) -> bool:
    """Whether it is over."""
    training = BedJob(workers_per_node=_WORKERS, duration_s=options.duration_s)
    with (
        TestBed(nodes=_NODES, egress_mbit=_HEALTHY_MBIT) as bed,
        StoreWriter(options.store, job=training.as_dict()) as store,
        CampaignStop.on_signals() as stop,
        ExitStack() as stack,
    ):
        executor = LocalExecutor([_seat(bed, n) for n in range(_NODES)], command=_pinned)
        stack.callback(executor.close)
        striker = Striker(
            bed,
            store.folder,
            told,
            after_s=options.healthy_s,
            hold_s=options.fault_s,
            stop=stop,
            most=options.most,
            keep=options.keep,
        )
        stack.callback(striker._undo)
        campaign = Campaign(plan, store.attempts)
        run_campaign(campaign, training, store, executor, stop=stop, audience=striker)
        return campaign.tally().left == 0


def _seat(bed: TestBed, number: int) -> Seat:
    node = bed.nodes[number]
    variables = (f"FAILSLOW_CAPTURE_FOLDER={node.rings}", f"GLOO_SOCKET_IFNAME={node.interface}")
    return Seat(
        name=f"node{number}",
        address=node.address,
        prefix=(*bed.way_into(node, host=f"node{number}"), "env", *variables),
    )


def _pinned(
    spec: ProbeSpec,
    *,
    out: str | Path | None = None,
    folder: str | Path | None = None,
    history: Sequence[str | Path] = (),
    node_rank: int | None = None,
    rendezvous: str | None = None,
) -> tuple[str, ...]:
    """The probe's command; of several nodes each on one of the two cores."""
    argv = command(
        spec, out=out, folder=folder, history=history, node_rank=node_rank, rendezvous=rendezvous
    )
    return argv if node_rank is None else ("taskset", "-c", str(node_rank % 2), *argv)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _size(text: str) -> SizeClass:
    nodes, _, count = text.partition("x")
    if nodes not in ("1", "4") or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not 1xCOUNT or 4xCOUNT")
    return SizeClass(nodes=int(nodes), probes=int(count))


def main() -> None:
    """Run what is left of the campaign, then score what the store holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--probes", type=_size, action="append", help="1xCOUNT or 4xCOUNT")
    parser.add_argument("--duration-s", type=float, default=40.0, help="of training")
    parser.add_argument("--healthy-s", type=float, default=8.0, help="before a fault")
    parser.add_argument("--fault-s", type=float, default=20.0, help="that a fault lasts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most", type=int, help="probes in this run")
    parser.add_argument("--keep", type=Path, help="folder for journals of the struck ones")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if reason := TestBed.available():
        raise SystemExit(reason)
    sizes = options.probes or [SizeClass(nodes=1, probes=10), SizeClass(nodes=4, probes=20)]
    plan = CampaignPlan(sizes=tuple(sizes), max_nodes=_NODES, backoff_s=0.0)
    told = truths(plan, options.seed)
    is_over = _campaign(options, plan, told)
    study = study_probes(read_store(options.store).records, duration_s=options.duration_s)
    scored = score(study, told)
    right = sum(one.right for one in scored)
    pct = 100.0 * right / len(scored) if scored else 0.0
    named = [one.node_named for one in scored if one.node_named is not None]
    expected = expected_table(plan, told)
    found = {row.nodes: dict(row.causes) for row in study.sizes if row.nodes is not None}
    equal = is_over and found == expected
    if options.json:
        document = {
            "schema": "failslow.benchmark.probe_campaign/1",
            "probes": [asdict(one) for one in scored],
            "over": is_over,
            "right_pct": pct,
            "nodes_named": [sum(named), len(named)],
            "table": {"expected": expected, "found": found, "equal": equal},
        }
        print(json.dumps(document))
    else:
        table = Table(box=None, pad_edge=False)
        for name in ("probe", "injected", "found", ""):
            table.add_column(name, overflow="fold")
        for one in scored:
            table.add_row(one.probe, one.truth, one.found, "right" if one.right else "WRONG")
        Console(highlight=False).print(table)
        emit_view(probe_study_view(study, source=str(options.store)))
        verdict = "equals" if equal else "differs from" if is_over else "is not yet all of"
        print(
            f"{len(scored)} probes: {right} right ({pct:.1f} %), node named in {sum(named)} of "
            f"{len(named)}; the table {verdict} the truth {expected}"
        )
    raise SystemExit(0 if equal and pct >= _GOAL_PCT else 1 if is_over else 130)


if __name__ == "__main__":
    main()
