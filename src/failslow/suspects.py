"""The records from call streams to a suspicion of somebody; `records` exports them.

Agents make a `RankProfile` of each worker's calls, localize compares them and makes a `Diagnosis`
of `Suspect`s. One line of a journal each:

    {"kind":"rankprofile","rank":3,"node":"gpu-17","iterations":20,"compute_s":0.051,"cells":[
     {"group":[0,1,2,3],"label":"mesh_dp","op":"allreduce_","size_bytes":66560,"position":0,
      "calls":20,"duration_s":0.0042,"wait_s":0.0011,"gap_s":0.0508}, …],…}    (`profile_wire`)
    {"kind":"diagnosis","episode":"e1745735301","suspects":[{"what":"compute","ranks":[3],
     "slowdown":1.52,"score":0.93,…}],"note":"",…}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from failslow.steering import Measurement

__all__ = ["CallCell", "Diagnosis", "RankProfile", "Suspect", "group_label"]


def group_label(label: str) -> str:
    """What a group is called, "" where nobody named it: torch describes it as "undefined" then."""
    return "" if label == "undefined" else label


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCell:
    """One place in a worker's iteration at which it makes a call: medians over the window.

    Cells of two workers compare when group, op, size and position agree.
    """

    group: tuple[int, ...]
    """Global ranks in the order of the group; () unknown."""
    label: str
    """What torch calls the group: its description, else its name; "" where nobody named it."""
    op: str
    size_bytes: int
    """0: it differs from one iteration to the next."""
    position: int
    """Ordinal among the calls of this group, op, size and peer in one iteration. A cell may stand
    for several in a row: as many as `calls` over the profile's iterations."""
    peer: int | None = None
    """Root, or the other side of a send or recv, as a global rank."""
    calls: int
    """How many the numbers are medians of."""
    duration_s: float | None
    """From entering the call to its completion; None where nobody knows (host enqueue times of a
    device are no durations)."""
    wait_s: float
    """How long the caller was blocked for it, in the call and in waits."""
    gap_s: float
    """From the end of the worker's call before it to its start: the worker's own time."""
    spread_s: float = 0.0
    """Median absolute deviation of the duration (of the wait where that is unknown)."""
    least_s: float | None = None
    """The duration of the shortest tenth of the calls: what it takes when nobody is late."""
    hidden_s: float = 0.0
    """Part of `wait_s` in which nobody was seen to wait, but may have: it was complete before the
    worker went on."""
    overlap: float = 0.0
    """Share of the calls the worker went on without, before they were complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """How one worker's calls went in a window of time."""

    rank: int
    node: str
    host: str = ""
    """The physical machine (its boot id): containers of one machine are on one host."""
    device: str = ""
    """Model of the device ("cpu", "NVIDIA H200" …): only equal ones compare. "" unknown."""
    device_id: str = ""
    """Which of the machine's devices ("GPU-5fd4f087-…"); "" unknown, or its processor."""
    nic: str = ""
    """Interface that all its traffic was told to take; "" unknown."""
    trees: bool = False
    """Its all-reduces were told to run along trees (NCCL_ALGO)."""
    start_t: float
    end_t: float
    """Epoch seconds of the window, by the worker's clock."""
    iterations: int
    iteration_s: float
    """Median."""
    compute_s: float | None
    """Median seconds per iteration in which it was in no call and blocked by none."""
    compute_spread_s: float = 0.0
    """Median absolute deviation of that from one iteration to the next."""
    cells: tuple[CallCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Who looks slow, and by which numbers; nothing is proved yet."""

    what: Literal["compute", "link", "group"]
    """compute: the ranks' own time between calls · link: transfers from `ranks` to `peer_ranks` ·
    group: transfers in the group of `ranks`, no link told apart."""
    ranks: tuple[int, ...]
    peer_ranks: tuple[int, ...] = ()
    label: str = ""
    """Of the group it was seen in."""
    slowdown: float
    """Its time over that of comparable workers or groups, or over its own healthy time."""
    extra_s: float
    """Seconds per iteration it takes longer."""
    score: float
    """0..1: how much of the job's slowdown it explains, and how far it is out of the noise."""
    measurements: tuple[Measurement, ...] = ()
    note: str = ""
    """"nothing to compare to" …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What comparing the profiles of a job's workers gave."""

    episode: str
    """Id of the suspicion or episode it explains."""
    suspects: tuple[Suspect, ...]
    """The likeliest first."""
    everyone: bool = False
    """All are late alike: not one worker (shared storage, collector pauses, the programme)."""
    compute_alike: bool = False
    """...because all compute longer by about the same factor and no transfer takes longer, as where
    the work of an iteration has grown and nobody told."""
    imbalance: str = ""
    """What is uneven by design, since before the slowness: "the last stage computes x1.30"."""
    ranks: tuple[int, ...] = ()
    """Workers whose profiles were there."""
    missing: tuple[int, ...] = ()
    """...and those whose were not."""
    note: str = ""
