"""Trees of files as /proc and /sys show them: the formats are the kernel's (Linux 6), the numbers
made up."""

from __future__ import annotations

from pathlib import Path

__all__ = ["Machine", "RdmaPort", "write"]

_SCHEDSTAT = "{} {} {}\n"
_HARDWARE = [
    "duplicate_request",
    "implied_nak_seq_err",
    "lifespan",
    "local_ack_timeout_err",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "out_of_buffer",
    "out_of_sequence",
    "packet_seq_err",
    "req_cqe_error",
    "req_cqe_flush_error",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "roce_slow_restart",
    "rnr_nak_retry_err",
    "rp_cnp_handled",
    "rp_cnp_ignored",
    "rx_icrc_encapsulated",
]
_PORT = [
    "VL15_dropped",
    "excessive_buffer_overrun_errors",
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "port_rcv_constraint_errors",
    "port_rcv_data",
    "port_rcv_errors",
    "port_rcv_packets",
    "port_xmit_constraint_errors",
    "port_xmit_data",
    "port_xmit_discards",
    "port_xmit_packets",
    "port_xmit_wait",
    "symbol_error",
]


def write(root: Path, files: dict[str, str]) -> None:
    """Write files, by their paths under `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Machine:
    """A root with /proc and control groups of version 1 or 2."""

    def __init__(self, root: Path, *, version: int = 2) -> None:
        self.root, self.version = root, version
        if version == 2:
            mounts = "31 23 0:27 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
            write(root, {"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"})
        else:
            mounts = (
                "30 23 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
                "34 30 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            )
        write(root, {"proc/self/mountinfo": mounts, "proc/self/schedstat": "1 1 1\n"})
        self.machine()

    def machine(
        self,
        *,
        user: int = 0,
        system: int = 0,
        idle: int = 0,
        steal: int = 0,
        pressure_us: int = 0,
    ) -> None:
        """Whole-machine counts, in ticks of 10 ms; PSI in microseconds."""
        line = f"cpu  {user} 0 {system} {idle} 0 0 0 {steal} 0 0\n"
        write(
            self.root,
            {
                "proc/stat": line + line.replace("cpu ", "cpu0") + "intr 0\nctxt 5\n",
                "proc/pressure/cpu": f"some avg10=0.00 avg60=0.00 avg300=0.00 total={pressure_us}\n"
                "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
            },
        )

    def process(
        self,
        pid: int,
        *,
        threads: dict[int, tuple[int, int]],
        ticks: int = 0,
        state: str = "S",
        parent: int = 1,
        group: str = "/job",
        switches: tuple[int, int] = (0, 0),
        environ: str = "",
    ) -> None:
        """A process. threads: tid -> (nanoseconds run, nanoseconds waited); ticks: user time."""
        after = "0 " * 7 + f"{ticks} 0 0 0 20 0 {len(threads)} 0 99 0 0"
        controllers = "0:" if self.version == 2 else "4:cpu,cpuacct"
        folder = f"proc/{pid}"
        write(
            self.root,
            {
                # a command's name may hold brackets and spaces
                f"{folder}/stat": f"{pid} (py) S (x) {state} {parent} 1 1 {after}\n",
                f"{folder}/cgroup": f"{controllers}:{group}\n",
                f"{folder}/environ": environ.replace(" ", "\0"),
                f"{folder}/status": "Name:\tpy\nState:\tS (sleeping)\n"
                f"voluntary_ctxt_switches:\t{switches[0]}\n"
                f"nonvoluntary_ctxt_switches:\t{switches[1]}\n",
                **{
                    f"{folder}/task/{tid}/schedstat": _SCHEDSTAT.format(ran, waited, 7)
                    for tid, (ran, waited) in threads.items()
                },
            },
        )

    def group(
        self,
        name: str = "job",
        *,
        periods: int = 0,
        throttled: int = 0,
        held_us: int = 0,
        pressure_us: int = 0,
    ) -> None:
        """The counts of one control group."""
        if self.version == 2:
            write(
                self.root,
                {
                    f"sys/fs/cgroup/{name}/cpu.stat": "usage_usec 5\nuser_usec 3\nsystem_usec 2\n"
                    f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec {held_us}\n"
                    "nr_bursts 0\nburst_usec 0\n",
                    f"sys/fs/cgroup/{name}/cpu.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 "
                    f"total={pressure_us}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
                },
            )
        else:
            write(
                self.root,
                {
                    f"sys/fs/cgroup/cpu,cpuacct/{name}/cpu.stat": f"nr_periods {periods}\n"
                    f"nr_throttled {throttled}\nthrottled_time {held_us * 1000}\n"
                },
            )


class RdmaPort:
    """One port of an adapter, as mlx5 shows it."""

    def __init__(self, root: Path, device: str = "mlx5_0", port: int = 1) -> None:
        self.root = root
        self.folder = f"sys/class/infiniband/{device}/ports/{port}"
        self.link()

    def link(self, *, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> None:
        write(
            self.root,
            {
                f"{self.folder}/state": f"{state}\n",
                f"{self.folder}/phys_state": "5: LinkUp\n",
                f"{self.folder}/rate": f"{rate}\n",
                f"{self.folder}/link_layer": "Ethernet\n",
            },
        )

    def counts(self, **counts: int) -> None:
        """Named counters; all others stay at 0."""
        assert counts.keys() <= {*_HARDWARE, *_PORT}
        write(
            self.root,
            {
                **{f"{self.folder}/hw_counters/{n}": f"{counts.get(n, 0)}\n" for n in _HARDWARE},
                **{f"{self.folder}/counters/{n}": f"{counts.get(n, 0)}\n" for n in _PORT},
            },
        )
