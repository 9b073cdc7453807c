"""Processors: who uses them, and what keeps each worker from them.

In: /proc/stat, /proc/pressure/cpu, and of each worker /proc/PID and its control groups. Out:
`cpu/…` of the node and `rank/3/…` of each worker (names and units: `failslow.telemetry`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from failslow.inject.cgroups import CpuGroup, cpu_group
from failslow.telemetry.base import Rates, read
from failslow.telemetry.processes import JobProcesses, WorkerProcess, cpu_s, is_stopped

__all__ = ["CpuSampler"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOOKS, _MOST_LOOKS = 16, 2000
_REFRESH_S = 2.0
"""The machine's processes are looked through this often."""


class _Looks:
    """Whether a process was stopped when it was looked at."""

    def __init__(self) -> None:
        self._kept: deque[bool] = deque(maxlen=_MOST_LOOKS)
        self._fresh = 0

    def add(self, stopped: bool) -> None:
        self._kept.append(stopped)
        self._fresh += 1

    def share(self) -> float | None:
        """Of the looks since the last call, and of some before where those are few; None without
        any since."""
        count = min(max(self._fresh, _LOOKS), len(self._kept)) if self._fresh else 0
        self._fresh = 0
        return sum(list(self._kept)[-count:]) / count if count else None


class CpuSampler:
    """workers: rank -> pid of those on this node. job: its id, by which others of its processes
    are known. root: where /proc and /sys are."""

    def __init__(
        self, workers: Callable[[], Mapping[int, int]], *, job: str = "", root: Path = Path("/")
    ) -> None:
        self._workers, self._root, self._proc = workers, root, root / "proc"
        self._job = JobProcesses(self._proc, job)
        self._rates = Rates()
        self._processes: dict[int, WorkerProcess] = {}
        self._groups: dict[int, tuple[bytes, list[Path], Path | None]] = {}
        self._looks: dict[int, _Looks] = {}
        self._ours: set[int] = set()
        self._used_s: dict[int, float] = {}
        self._job_s = 0.0
        self._refreshed_s = -1e9
        self.spent_s: dict[str, float] = {}
        """What the parts of the last sample took."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Pressure needs a kernel with PSI; the rest is everywhere."""
        found = []
        if read(self._proc / "stat") is None:
            found.append(f"no processor load: {self._proc}/stat cannot be read")
        if read(self._proc / "pressure/cpu") is None:
            found.append("no CPU pressure: the kernel is without PSI, or it is switched off")
        if read(self._proc / "self/schedstat") is None:
            found.append("no run-queue wait: the kernel is without schedstat")
        return tuple(found)

    def peek(self) -> None:
        """Look whether workers are stopped. To be called at random moments some times a second:
        who stops a process does it in a rhythm."""
        for rank, pid in self._workers().items():
            stopped = is_stopped(self._proc, pid)
            if stopped is not None:
                self._looks.setdefault(rank, _Looks()).add(stopped)

    def sample(self, now_s: float) -> Mapping[str, float]:
        """As `Sampler.sample`."""
        values: dict[str, float | None] = {}
        begin_s = time.perf_counter()
        workers = dict(self._workers())
        for rank, pid in workers.items():
            for name, value in self._of_worker(rank, pid, now_s).items():
                values[f"rank/{rank}/{name}"] = value
        middle_s = time.perf_counter()
        values.update(self._of_node(workers, now_s))
        self._drop(workers)
        self.spent_s = {
            "workers": middle_s - begin_s,
            "node": time.perf_counter() - middle_s,
        }
        return {name: value for name, value in values.items() if value is not None}

    def _of_node(self, workers: Mapping[int, int], now_s: float) -> dict[str, float | None]:
        values: dict[str, float | None] = {}
        job = self._job_cores(workers, now_s)
        values["cpu/job_cores"] = job
        text = read(self._proc / "stat")
        if text is not None:
            # user nice system idle iowait irq softirq steal; guests are within user and nice
            ticks = [int(word) for word in text.split(b"\n", 1)[0].split()[1:9]]
            used, steal, total = ticks[0] + ticks[1] + ticks[2], ticks[7], sum(ticks)
            cores = self._rate("cpu/used", used / _TICKS_PER_S, now_s)
            whole = self._rate("cpu/whole", total / _TICKS_PER_S, now_s)
            stolen = self._rate("cpu/steal", steal / _TICKS_PER_S, now_s)
            if cores is not None and whole and stolen is not None:
                values["cpu/busy_share"] = min(1.0, cores / whole)
                values["cpu/steal_share"] = min(1.0, stolen / whole)
                if job is not None:
                    values["cpu/neighbour_cores"] = max(0.0, cores - job)
        values["cpu/pressure_share"] = self._pressure("cpu", self._proc / "pressure/cpu", now_s)
        return values

    def _job_cores(self, workers: Mapping[int, int], now_s: float) -> float | None:
        if now_s - self._refreshed_s >= _REFRESH_S or not self._ours.issuperset(workers.values()):
            self._refreshed_s = now_s
            self._ours = self._job.refresh(workers.values())
        used = {pid: cpu_s(self._proc, pid) for pid in self._ours}
        now = {pid: value for pid, value in used.items() if value is not None}
        # summed as increases: the sum itself falls when a process ends
        for pid, value in now.items():
            self._job_s += max(0.0, value - self._used_s.get(pid, value))
        self._used_s = now
        return self._rate("cpu/job", self._job_s, now_s)

    def _of_worker(self, rank: int, pid: int, now_s: float) -> dict[str, float | None]:
        process = self._processes.get(rank)
        if process is None or process.pid != pid:
            process = self._processes[rank] = WorkerProcess(self._proc, pid)
            self._forget(rank)
        counts = process.counts()
        if counts is None:
            return {}
        ran = self._rate(f"rank/{rank}/ran", counts.ran_s, now_s)
        waited = self._rate(f"rank/{rank}/waited", counts.waited_s, now_s)
        values = {
            "cpu_cores": self._rate(f"rank/{rank}/cpu", counts.cpu_s, now_s),
            "runqueue_cores": self._rate(f"rank/{rank}/longest", counts.longest_wait_s, now_s),
            "switches_per_s": self._rate(f"rank/{rank}/switches", counts.switches, now_s),
            "forced_switches_per_s": self._rate(
                f"rank/{rank}/forced", counts.forced_switches, now_s
            ),
            "stopped_share": self._looks[rank].share() if rank in self._looks else None,
        }
        if ran is not None and waited is not None:
            values["runqueue_share"] = waited / (ran + waited) if ran + waited > 0 else 0.0
        values.update(self._of_groups(rank, pid, now_s))
        return values

    def _of_groups(self, rank: int, pid: int, now_s: float) -> dict[str, float | None]:
        text = read(self._proc / str(pid) / "cgroup")
        if text is None:
            return {}
        known = self._groups.get(rank)
        if known is None or known[0] != text:  # a fault injected may have put it into another one
            known = self._groups[rank] = (text, *self._find_groups(pid, text))
        periods = throttled = held_s = 0.0
        _, levels, pressed = known
        for path in levels:
            stat = _table(read(path / "cpu.stat"))
            periods += stat.get(b"nr_periods", 0)
            throttled += stat.get(b"nr_throttled", 0)
            held_s += stat.get(b"throttled_time", 0) / 1e9 + stat.get(b"throttled_usec", 0) / 1e6
        if not levels:
            return {}
        # a group's counters are its own: what is counted in another one begins anew
        key = f"rank/{rank}/{levels[0]}"
        passed = self._rate(f"{key}/periods", periods, now_s)
        hit = self._rate(f"{key}/throttled", throttled, now_s)
        values = {"throttled_cores": self._rate(f"{key}/held", held_s, now_s)}
        if passed is not None and hit is not None:
            values["throttled_share"] = min(1.0, hit / passed) if passed > 0 else 0.0
        if pressed is not None:
            values["pressure_share"] = self._pressure(key, pressed, now_s)
        return values

    def _find_groups(self, pid: int, text: bytes) -> tuple[list[Path], Path | None]:
        """The control groups whose quotas hold a process, its own first, and its pressure file."""
        group = cpu_group(pid, proc=self._proc, root=self._root)
        if group is None:
            return [], None
        levels = []
        for path in (group.path, *group.path.parents):
            levels.append(self._root / path.relative_to("/"))
            if path == group.root:
                break
        return levels, self._pressure_file(text, group)

    def _pressure_file(self, text: bytes, group: CpuGroup) -> Path | None:
        """PSI of a group is in the tree of version 2; the root's is the machine's."""
        for line in text.decode(errors="replace").splitlines():
            number, _, path = line.split(":", 2)
            if number == "0" and path != "/":
                top = group.root if group.version == 2 else group.root.parent / "unified"
                file = self._root / top.relative_to("/") / path.lstrip("/") / "cpu.pressure"
                return file if file.exists() else None
        return None

    def _pressure(self, key: str, path: Path, now_s: float) -> float | None:
        text = read(path)
        if text is None or not text.startswith(b"some"):
            return None
        total_us = float(text.split(b"\n", 1)[0].rpartition(b"total=")[2])
        rate = self._rate(f"{key}/pressure", total_us / 1e6, now_s)
        return None if rate is None else min(1.0, rate)

    def _rate(self, key: str, count: float, now_s: float) -> float | None:
        return self._rates.update(key, count, now_s)

    def _forget(self, rank: int) -> None:
        """Another process has the rank."""
        self._rates.forget_all(f"rank/{rank}/")
        self._groups.pop(rank, None)
        self._looks.pop(rank, None)

    def _drop(self, workers: Mapping[int, int]) -> None:
        for rank in self._processes.keys() - workers.keys():
            del self._processes[rank]
            self._forget(rank)


def _table(text: bytes | None) -> dict[bytes, int]:
    """The lines "name number" of a cpu.stat."""
    words = (text or b"").split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=False))
