"""Which series would tell of which cause: of a worker's processor time, a GPU, a link.

In: nothing. Out: pairs of a series' name and the `Cue` it is. The causes are the field study's
(FALCON, arXiv 2410.12588, §3): contention for processors, degraded devices, congested networks.
Heat is listed, but decides nothing: hot GPUs are often healthy.
"""

from __future__ import annotations

from failslow.localize.facts import CONGESTION, CONTENTION, DEGRADATION, Cue

__all__ = [
    "drop_cue",
    "ecn_cues",
    "foreign_cue",
    "gpu_cues",
    "node_contention",
    "quota_cue",
    "speed_cue",
    "stop_cue",
    "traffic_cues",
    "wait_cue",
]


def wait_cue(rank: int) -> Cue:
    """For the seconds a second in which a worker's threads were ready, waited for a core, and no
    quota held them."""
    return Cue(
        cause=CONTENTION, text=f"rank {rank} waited for a core", unit=" s/s", least=0.05, factor=1.3
    )


def node_contention(node: str) -> tuple[tuple[str, Cue], ...]:
    """What others take of a node's processors."""
    return (
        (
            "cpu/neighbour_cores",
            Cue(
                cause=CONTENTION,
                text=f"other processes on {node} used",
                unit=" cores",
                least=0.25,
                factor=1.2,
                decides=False,
            ),
        ),
        (
            "cpu/steal_share",
            Cue(
                cause=CONTENTION,
                text=f"the hypervisor took from {node}",
                least=0.05,
                factor=1.5,
                unit=" %",
            ),
        ),
    )


def quota_cue(rank: int, cause: str) -> Cue:
    """For the CPU time a quota kept from a worker: `throttled_cores`."""
    return Cue(
        cause=cause,
        text=f"its control group's quota kept from rank {rank}",
        unit=" s/s",
        least=0.03,
        factor=1.3,
        detail="quota" if cause == DEGRADATION else "",
    )


def stop_cue(rank: int) -> Cue:
    """For `stopped_share`, on a machine where that stands for a slow device."""
    return Cue(
        cause=DEGRADATION,
        text=f"signals stopped rank {rank} for",
        least=0.04,
        detail="stopped by signals",
        unit=" %",
    )


def gpu_cues(gpu: int) -> tuple[tuple[str, Cue], ...]:
    """What would make one GPU slower."""
    name = f"GPU {gpu}"
    return (
        (
            f"gpu/{gpu}/throttle_thermal",
            Cue(
                cause=DEGRADATION,
                text=f"heat held the clocks of {name} down for",
                least=0.2,
                standing=True,
                detail="thermal",
                unit=" %",
            ),
        ),
        (
            f"gpu/{gpu}/throttle_power",
            Cue(
                cause=DEGRADATION,
                text=f"its power limit held the clocks of {name} down for",
                least=0.2,
                standing=True,
                detail="power",
                unit=" %",
            ),
        ),
        (
            f"gpu/{gpu}/throttle_hardware",
            Cue(
                cause=DEGRADATION,
                text=f"its board held the clocks of {name} down for",
                least=0.2,
                standing=True,
                unit=" %",
            ),
        ),
        (
            f"gpu/{gpu}/sm_mhz",
            Cue(
                cause=DEGRADATION,
                text=f"the SMs of {name} ran at",
                unit=" MHz",
                least=30.0,
                factor=1.03,
                falls=True,
                detail="clocks",
            ),
        ),
        (
            f"gpu/{gpu}/memory_mhz",
            Cue(
                cause=DEGRADATION,
                text=f"the memory of {name} ran at",
                unit=" MHz",
                least=30.0,
                factor=1.03,
                falls=True,
                detail="clocks",
            ),
        ),
        *(
            (
                f"gpu/{gpu}/{what}_per_s",
                Cue(cause=DEGRADATION, text=f"{name} counted {text}", unit="/s", least=least),
            )
            for what, text, least in (
                ("ecc_corrected", "corrected memory errors", 1.0),
                ("ecc_uncorrected", "uncorrected memory errors", 0.01),
                ("pcie_replays", "PCIe replays", 1.0),
                ("nvlink_errors", "NVLink errors", 1.0),
            )
        ),
        (
            f"gpu/{gpu}/temperature_c",
            Cue(
                cause=f"{DEGRADATION} (heat alone is no cause)",
                text=f"{name} had",
                unit=" °C",
                least=3.0,
                decides=False,
            ),
        ),
    )


def ecn_cues(name: str) -> tuple[tuple[str, Cue], ...]:
    """What congestion makes an RDMA port count. name: "gpu-1's mlx5_0:1"."""
    return tuple(
        (
            f"{what}_per_s",
            Cue(
                cause=CONGESTION,
                text=f"{name} {text}",
                unit="/s",
                least=least,
                factor=2.0,
                decides=decides,
            ),
        )
        for what, text, least, decides in (
            ("cnp_handled", "was told to slow down (CNPs handled)", 10.0, True),
            ("cnp_sent", "told others to slow down (CNPs sent)", 10.0, True),
            ("ecn_marked", "received packets marked by switches (ECN)", 10.0, True),
            ("out_of_sequence", "received packets out of sequence", 5.0, True),
            ("retransmits", "sent again", 5.0, True),
            ("timeouts", "ran into time-outs", 0.5, True),
            ("discards", "discarded packets", 5.0, True),
            ("wait_ticks", "had data but no credit for (ticks)", 1e5, False),
        )
    )


def speed_cue(what: str) -> Cue:
    """For `…/speed_bits_per_s`. what: "gpu-1's mlx5_0:1"."""
    return Cue(
        cause=DEGRADATION,
        text=f"the link of {what} ran at",
        unit=" bit/s",
        least=1e6,
        factor=1.2,
        falls=True,
        detail="link speed",
    )


def drop_cue(interface: str) -> Cue:
    """For what an interface dropped or found broken, both ways together."""
    return Cue(
        cause=CONGESTION,
        text=f"{interface} counted drops and errors",
        unit="/s",
        least=5.0,
        factor=2.0,
    )


def foreign_cue(way: str, node: str) -> Cue:
    """For what passed a node's interfaces beyond the job's own connections. way: "left"."""
    return Cue(
        cause=CONGESTION,
        text=f"traffic that is not the job's {way} {node} at",
        unit=" B/s",
        least=1e6,
        factor=1.5,
    )


def traffic_cues(key: str, text: str) -> tuple[tuple[str, Cue], ...]:
    """What a full link does to the TCP connections over it. key: "peer/10.77.0.1"; text: "from
    gpu-1 to gpu-2"."""
    return (
        (
            f"{key}/rtt_s",
            Cue(
                cause=CONGESTION,
                text=f"round trips {text} took",
                unit=" ms",
                least=0.001,
                factor=1.5,
            ),
        ),
        (
            f"{key}/delivery_bytes_per_s",
            Cue(
                cause=CONGESTION,
                text=f"data {text} arrived at",
                unit=" B/s",
                least=1e5,
                factor=1.5,
                falls=True,
                decides=False,
            ),
        ),
        (
            f"{key}/busy_share",
            Cue(
                cause=CONGESTION,
                text=f"data were under way {text} for",
                least=0.15,
                factor=1.3,
                decides=False,
                unit=" %",
            ),
        ),
        (
            f"{key}/retransmits_per_s",
            Cue(
                cause=CONGESTION,
                text=f"segments {text} were sent again",
                unit="/s",
                least=2.0,
                factor=2.0,
            ),
        ),
    )
