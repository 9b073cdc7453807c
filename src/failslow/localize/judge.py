"""From what a pause measured to a verdict. Pure.

In: results of `localize.benchmarks.run_script` of all ranks, the same from healthy times, and
where the workers are. Out: a verdict that names every component that is slow beyond the noise:

    {"kind":"verdict","episode":"e1745735301","findings":[
      {"what":"device","slowdown":1.41,"ranks":[5],"host":"gpu-17","device":"NVIDIA H200",…},
      {"what":"link","slowdown":5.1,"ranks":[2],"host":"gpu-3","peer_ranks":[],…}],…}

A link is directed. All that a node sends being slow is one finding, its card: `ranks` are the
node's workers, `peer_ranks` is empty. All that it receives: the other way round.

On CPUs "device" is what the processor did (ran slower, was held by a quota, was stopped), "host"
what others took from it (waiting for a core).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from failslow.localize.judge_links import LinkJudge
from failslow.localize.levels import Compared, Limits, Reading, common_change, compare
from failslow.localize.readings import (
    GemmReading,
    HostReading,
    gemm_readings,
    host_readings,
    merge_checks,
    merge_runs,
    unmeasured,
)
from failslow.localize.script import WorkerPlace, is_cpu
from failslow.records import Finding, Measurement, Verdict

__all__ = ["JudgeSettings", "judge"]

Result = Mapping[str, Any]
_DEVICE = Limits(peers=1.15, reference=1.10)
_HOST = Limits(peers=1.3, reference=1.25)
_LINK = Limits(peers=1.5, reference=1.3)
""""Half its bandwidth" is 2; paths through a network differ by less than 1.5 in most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """From when on a ratio is a finding, however quiet the measurements are."""

    device: Limits = _DEVICE
    host: Limits = _HOST
    link: Limits = _LINK
    cpu: float = 1.3
    """A processor that was neither held nor stopped must be so slow: what runs beside it costs it
    cache and clock."""
    common: float = 1.15
    """All being slower alike is said from here on."""


def judge(
    results: Iterable[Result],
    reference: Iterable[Result],
    workers: Sequence[WorkerPlace],
    *,
    episode: str,
    step: int | None = None,
    pause_s: float = 0.0,
    settings: JudgeSettings | None = None,
) -> Verdict:
    """The verdict of one pause.

    results, reference: of all ranks in one list, in any order; () where there is no reference.
    What cannot be read, or is of a rank that `workers` does not know, is left out.
    """
    case = _Case(
        list(results), list(reference), {w.rank: w for w in workers}, settings or JudgeSettings()
    )
    findings = case.computing()
    links = LinkJudge(case.places, case.settings.link, case.slow_workers, case.held_workers)
    findings += links.findings(case.results, case.reference)
    notes = [*case.notes, *links.notes]
    if not findings:
        notes.insert(0, _nothing(case, links))
    findings.sort(key=lambda finding: -finding.slowdown)
    # at the reference nothing was known to be slow that could be well again
    well = (*case.well(findings), *links.well(case.results)) if episode else ()
    return Verdict(
        episode=episode,
        findings=tuple(findings),
        well=well,
        step=step,
        pause_s=pause_s,
        note="; ".join(notes),
    )


def _nothing(case: _Case, links: LinkJudge) -> str:
    if not (case.devices_measured or case.hosts_measured or links.measured):
        return "nothing was measured"
    return (
        f"{case.devices_measured} devices, {case.hosts_measured} hosts and "
        f"{links.measured} links are as fast as their like"
    )


@dataclass(slots=True)
class _Case:
    """What is known, and what came out about devices and hosts."""

    results: list[Result]
    reference: list[Result]
    places: dict[int, WorkerPlace]
    settings: JudgeSettings
    slow_workers: dict[int, float] = field(default_factory=dict)
    """{rank: slowdown} of workers whose own processor is slow: their transfers are, too."""
    held_workers: set[int] = field(default_factory=set)
    """Those among them that a quota or signals hold at times."""
    notes: list[str] = field(default_factory=list)
    devices_measured: int = 0
    hosts_measured: int = 0
    fast_devices: set[int] = field(default_factory=set)
    """Workers whose matrix products take no longer than they should..."""
    fast_hosts: set[str] = field(default_factory=set)
    """...and nodes of which that holds for all that was measured."""

    def computing(self) -> list[Finding]:
        """Devices and hosts."""
        now, before = self._gemms(self.results), self._gemms(self.reference)
        self._say_unmeasured()
        self.devices_measured = len(now)
        slow: dict[int, Compared] = {}
        waiting: dict[int, Compared] = {}
        together: list[Finding] = []
        for kind in dict.fromkeys((r.kind, self.places[rank].device) for rank, r in now.items()):
            these = {rank: r for rank, r in now.items() if self._is(rank, r, kind)}
            those = {rank: r for rank, r in before.items() if self._is(rank, r, kind)}
            device_now = {rank: r.device for rank, r in these.items()}
            device_before = {rank: r.device for rank, r in those.items()}
            compared = compare(device_now, device_before, self.settings.device)
            slow |= {
                rank: c
                for rank, c in compared.items()
                if c.is_slow and (c.ratio >= self._least(rank, these[rank]))
            }
            self.fast_devices |= {
                rank
                for rank, c in compared.items()
                if not c.is_slow
                and c.ratio <= max(self.settings.device.peers, self._least(rank, these[rank]))
            }
            together += self._together(device_now, device_before)
            shares = {rank: r.waiting for rank, r in these.items() if r.waiting}
            shares_before = {rank: r.waiting for rank, r in those.items() if r.waiting}
            contended = compare(shares, shares_before, self.settings.host)
            waiting |= {rank: c for rank, c in contended.items() if c.is_slow}
        hosts = self._hosts()
        for rank in hosts:
            if rank in now and rank not in slow | waiting and is_cpu(self.places[rank].device):
                hosts[rank] = []  # a check of a moment, where the work itself is as fast as ever
        findings = together
        nodes = dict.fromkeys(self.places[r].node for r in (*now, *hosts))
        workers: dict[str, list[int]] = {}
        for rank, place in sorted(self.places.items()):
            workers.setdefault(place.node, []).append(rank)
        for node in nodes:
            findings += self._node(tuple(workers[node]), now, slow, waiting, hosts)
        for node in nodes:
            ranks = set(workers[node])
            tested = ranks & now.keys()
            # no check of this host where others were checked: it was not asked
            checked = not hosts or bool(ranks & hosts.keys())
            slow_checks = any(hosts.get(rank) for rank in ranks)
            if checked and not slow_checks and tested and tested <= self.fast_devices - {*waiting}:
                self.fast_hosts.add(node)
        for finding in findings:
            if all(is_cpu(self.places[rank].device) for rank in finding.ranks):
                for rank in finding.ranks:
                    known = self.slow_workers.get(rank, 1.0)
                    self.slow_workers[rank] = max(known, finding.slowdown)
                    if rank in now and now[rank].is_held:
                        self.held_workers.add(rank)
        return findings

    def well(self, findings: Sequence[Finding]) -> list[str]:
        """Keys of the devices and hosts that were measured and are as fast as they should be."""
        named = {finding.key for finding in findings}
        devices, hosts = sorted(self.fast_devices), sorted(self.fast_hosts)
        fast = [Finding(what="device", slowdown=1.0, ranks=(rank,)).key for rank in devices]
        fast += [Finding(what="host", slowdown=1.0, ranks=(), host=node).key for node in hosts]
        return [key for key in fast if key not in named]

    def _least(self, rank: int, reading: GemmReading) -> float:
        """The ratio below which a device is not named."""
        on_cpu = is_cpu(self.places[rank].device)
        return self.settings.cpu if on_cpu and not reading.is_held else 1.0

    def _gemms(self, results: Iterable[Result]) -> dict[int, GemmReading]:
        return merge_runs(gemm_readings(results, self.places))

    def _is(self, rank: int, reading: GemmReading, kind: tuple[str, str]) -> bool:
        """Only like benchmarks of like devices compare."""
        return (reading.kind, self.places[rank].device) == kind

    def _together(self, now: Mapping[int, Reading], before: Mapping[int, Reading]) -> list[Finding]:
        """All slower alike: the host, if it is one host's devices, else nobody in particular."""
        ratio = common_change(now, before)
        if ratio < self.settings.common:
            return []
        nodes = {self.places[rank].node for rank in now}
        if len(nodes) > 1:
            self.notes.append(f"all devices are x{ratio:.2f} slower than at the reference, alike")
            return []
        return [
            Finding(
                what="host",
                slowdown=ratio,
                ranks=tuple(sorted(now)),
                host=nodes.pop(),
                evidence=(f"all {len(now)} devices are slower than at the reference, alike",),
            )
        ]

    def _hosts(self) -> dict[int, list[tuple[HostReading, Compared]]]:
        """{rank: its host checks that were slow}, with an empty list where all were fast."""
        found: dict[int, list[tuple[HostReading, Compared]]] = {}
        now = merge_checks(host_readings(self.results, self.places))
        before = merge_checks(host_readings(self.reference, self.places))
        for what in dict.fromkeys(reading.what for reading in now):
            kinds = {rank: self.places[rank].device for rank in self.places}
            these = {r.rank: r for r in now if r.what == what}
            for kind in dict.fromkeys(kinds[rank] for rank in these):
                compared = compare(
                    {rank: r.reading for rank, r in these.items() if kinds[rank] == kind},
                    {r.rank: r.reading for r in before if r.what == what and kinds[r.rank] == kind},
                    self.settings.host,
                )
                for rank, c in compared.items():
                    found.setdefault(rank, [])
                    if c.is_slow:
                        found[rank].append((these[rank], c))
        self.hosts_measured = len({self.places[rank].node for rank in found})
        return found

    def _node(
        self,
        workers: tuple[int, ...],
        gemms: Mapping[int, GemmReading],
        slow: Mapping[int, Compared],
        waiting: Mapping[int, Compared],
        hosts: Mapping[int, list[tuple[HostReading, Compared]]],
    ) -> list[Finding]:
        """What is slow on one node, that of these workers: single devices, the host, or both."""
        tested = [rank for rank in workers if rank in gemms]
        culprits = [rank for rank in tested if rank in slow]
        checks = {rank: hosts[rank] for rank in workers if hosts.get(rank)}
        on_cpu = all(is_cpu(self.places[rank].device) for rank in workers)
        # one worker's processor being slow shows in its host check as well: that is no host's fault
        is_host = bool(checks) and culprits == tested and len(tested) > (1 if on_cpu else 0)
        if is_host and on_cpu:
            is_host = all(rank in checks for rank in tested)
        findings = []
        if not is_host:
            findings += [self._device(rank, gemms[rank], slow[rank]) for rank in culprits]
            if on_cpu:
                checks = {rank: found for rank, found in checks.items() if rank not in culprits}
        kept = [rank for rank in workers if rank in waiting]
        if not (checks or kept or is_host):
            return findings
        ratios = [c.ratio for found in checks.values() for _, c in found]
        ratios += [waiting[rank].ratio for rank in kept]
        numbers = [
            Measurement(
                what=f"host check: {reading.what}",
                value=c.value_s,
                unit="s",
                expected=c.expected_s,
            )
            for found in checks.values()
            for reading, c in found
        ]
        numbers += [_waiting(rank, waiting[rank]) for rank in kept]
        if is_host:
            ratios = [slow[rank].ratio for rank in culprits]
            numbers = [m for r in culprits for m in self._numbers(gemms[r], slow[r])] + numbers
        ranks = tuple(sorted({*kept, *checks})) if on_cpu and not is_host else workers
        return [
            *findings,
            Finding(
                what="host",
                slowdown=max(ratios),
                ranks=ranks,
                host=self.places[workers[0]].node,
                measurements=tuple(numbers),
            ),
        ]

    def _device(self, rank: int, reading: GemmReading, compared: Compared) -> Finding:
        place = self.places[rank]
        return Finding(
            what="device",
            slowdown=compared.ratio,
            ranks=(rank,),
            host=place.node,
            device=place.device,
            measurements=tuple(self._numbers(reading, compared)),
            evidence=reading.facts(),
        )

    @staticmethod
    def _numbers(reading: GemmReading, compared: Compared) -> list[Measurement]:
        return [
            Measurement(
                what=f"gemm {reading.kind}",
                value=compared.value_s,
                unit="s",
                expected=compared.expected_s,
            )
        ]

    def _say_unmeasured(self) -> None:
        """Benchmarks that failed."""
        failed: dict[str, list[str]] = {}
        for result in self.results:
            if result.get("do") in ("gemm", "host", "all") and result.get("error"):
                failed.setdefault(str(result["error"]), []).append(str(result.get("rank")))
        self.notes += unmeasured(failed, "rank", "ranks")


def _waiting(rank: int, compared: Compared) -> Measurement:
    """The ratio is wall over running time: 2.0 is waiting for half of the time."""
    share, usual = (1.0 - 1.0 / v for v in (compared.value_s, max(1.0, compared.expected_s)))
    return Measurement(
        what=f"rank {rank} waiting for a core",
        value=round(share, 4),
        unit="of the time",
        expected=round(usual, 4),
    )
