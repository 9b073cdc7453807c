"""The workers of one node: finds their rings, follows each, notices when they end.

In: the ring folder. Out: `WorkerSamples` with what is new, and the `WorkerState` of each worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from failslow.capture.reader import RECORD_DTYPE, Group, RingReader
from failslow.config import TrackConfig
from failslow.errors import CaptureError
from failslow.mailbox import Mailbox, mail_path
from failslow.pipeline import WorkerSamples, WorkerState
from failslow.records import StepSample
from failslow.runtime.rendezvous import net_namespace
from failslow.track import Tracker

__all__ = ["Follower", "NodeWatch"]


class Follower:
    """One worker: its ring and its iterations."""

    def __init__(self, path: Path, config: TrackConfig) -> None:
        """Raises CaptureError when it is no ring that can be read."""
        self.path = path
        self._reader = RingReader(path)
        about = self._reader.description
        self.rank: int = self._reader.rank
        self.world_size: int = self._reader.world_size
        self.pid: int = self._reader.pid
        self.worker = f"{self.pid}-{about['pid_start_ticks']}"
        self._epoch_s = self._reader.to_epoch_s(0)
        self._tracker = Tracker(ops=about["ops"], config=config)
        self.ended = False
        self.fresh = np.empty(0, RECORD_DTYPE)
        """The records of the last read, and..."""
        self.samples: list[StepSample] = []
        """...the iterations they ended."""
        self._mailbox: Mailbox | None = None
        self._records = self._lost = 0
        self._fault = ""

    def read(self) -> list[StepSample]:
        """Iterations that ended since the last call; `end_s` is epoch seconds."""
        self.fresh = np.empty(0, RECORD_DTYPE)
        if self.ended:
            return []
        # looked up before reading: what it wrote before it ended is read below
        ended = self._reader.closed or not self._reader.alive
        batch = self._reader.read()
        self.fresh = batch.records
        self._records += len(batch.records)
        self._lost += batch.lost
        samples = self._tracker.update(batch.records, lost=batch.lost)
        if ended:
            self.ended = True
        return [replace(s, end_s=s.end_s + self._epoch_s) for s in samples]

    @property
    def mailbox(self) -> Mailbox | None:
        """The way to the worker; None when it has none."""
        if self._mailbox is None and not self.ended:
            with contextlib.suppress(CaptureError):  # not made yet, or no room for it
                self._mailbox = Mailbox.open(mail_path(self.path))
        return self._mailbox

    @property
    def groups(self) -> list[Group]:
        """Its process groups so far, by their number."""
        return self._reader.groups()

    @property
    def description(self) -> dict[str, Any]:
        """What its ring says of it, its device included."""
        return {**self._reader.description, "device": self._reader.device()}

    def count(self, number: int) -> int:
        """Collectives it has begun on a group that spans all workers."""
        return self._reader.count(number)

    def set_profile(self, on: bool) -> None:
        """Have completions recorded although that costs more a call, or no longer."""
        self._reader.set_profile(on)

    def to_epoch_s(self, monotonic_ns: float) -> float:
        """A time of its records on the epoch clock."""
        return self._reader.to_epoch_s(monotonic_ns)

    @property
    def counted(self) -> bool:
        """Nothing was lost: iterations are counted from the first one on."""
        return not self._lost

    @property
    def told(self) -> bool:
        """The trainer itself numbers the iterations."""
        return self._tracker.state.source == "step"

    @property
    def state(self) -> WorkerState:
        """For the agent's beat."""
        state = self._tracker.state
        return WorkerState(
            rank=self.rank,
            worker=self.worker,
            world_size=self._reader.world_size,
            alive=not self.ended,
            records=self._records,
            lost_records=self._lost,
            faults=self._reader.faults,
            iterations=state.iterations,
            source=state.source or "",
            note=state.note,
        )


_File = tuple[Path, int]
"""A path and its inode."""


class NodeWatch:
    """All workers of a job on this node.

    find: the job's rings. say: told what cannot be read.
    """

    def __init__(
        self,
        *,
        node: str,
        session: int,
        find: Callable[[], Iterable[Path]],
        config: TrackConfig,
        say: Callable[[str], None],
    ) -> None:
        self._node, self._session = node, session
        self._find, self._config, self._say = find, config, say
        self._own = net_namespace("self")
        self._followers: dict[_File, Follower] = {}
        self._refused: set[_File] = set()

    def discover(self) -> bool:
        """Look for rings not known yet; whether there were any."""
        found = False
        for path in self._find():
            try:
                file = (path, path.stat().st_ino)  # a process may end its ring and make another
                if file in self._followers or file in self._refused:
                    continue
                follower = Follower(path, self._config)
            except FileNotFoundError:
                continue
            except CaptureError as error:
                self._refused.add(file)
                self._say(str(error))
                continue
            if net_namespace(str(follower.pid)) not in ("", self._own):
                self._refused.add(file)  # another node's: a test bed shares the machine
                continue
            for old, other in list(self._followers.items()):
                if other.rank == follower.rank and other.ended:
                    del self._followers[old]
            self._followers[file] = follower
            found = True
        return found

    def read(self) -> Iterator[WorkerSamples]:
        """What is new of every worker; the records behind it are in each one's `fresh`."""
        for follower in self._followers.values():
            samples = follower.read()
            follower.samples = samples
            if samples:
                yield WorkerSamples(
                    node=self._node,
                    rank=follower.rank,
                    worker=follower.worker,
                    session=self._session,
                    counted=follower.counted,
                    told=follower.told,
                    samples=tuple(samples),
                )

    @property
    def workers(self) -> list[Follower]:
        """Every worker, those that have ended too."""
        return list(self._followers.values())

    @property
    def alive(self) -> bool:
        """Whether any worker known still runs."""
        return any(not follower.ended for follower in self._followers.values())

    @property
    def states(self) -> tuple[WorkerState, ...]:
        """Every worker, by rank; of two processes of a rank the one that lives."""
        states = sorted(
            (follower.state for follower in self._followers.values()), key=lambda s: s.alive
        )
        return tuple(sorted({s.rank: s for s in states}.values(), key=lambda s: s.rank))
