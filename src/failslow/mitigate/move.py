"""S3, live: workers change places by handing their state over, in memory and peer to peer.

In: each worker's state (parameters, optimizer, random generators, small extras) and who is where
now and afterwards. Out: the state of the new position, on every worker or on none:

    with transfer_group(limit_s=60.0) as group:
        moved = swap_state(state, placement_now=(0, 1, 2, 3), placement_new=(0, 1, 3, 2),
                           group=group, limit_s=60.0)
    moved.state            # of the position this worker now holds; `state` itself where it stays
    # Moved(position=3, sent_bytes=268435456, received_bytes=268435456, duration_s=0.31, …)

Two phases. First everything is announced, room for it is found, and it is received and checked
while the old state stays as it is. Then all ranks vote, and only a unanimous vote is acted on; a
worker that cannot see how the vote ended (its peer died in it) asks the job's store, whose first
entry counts for all. Any failure leaves every living worker with the state it had and a MoveError.

Host memory of a worker's own machine is read in place where that is allowed (`move_near`); all else
is sent. What the move costs in memory is one further copy of what comes, plus bundles of small
tensors and a few chunks; without room it is refused before a byte is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from failslow.errors import MoveError
from failslow.mitigate.move_near import Offer, addresses, can_read, collect, readable
from failslow.mitigate.move_pack import (
    MANIFEST_BYTES,
    Packed,
    TensorSpec,
    pack,
    read_manifest,
    unpack,
)
from failslow.mitigate.move_room import Need, free_bytes, lacking, place_name
from failslow.mitigate.move_route import Route, check_placements, find_route, plan_number
from failslow.mitigate.move_stream import (
    WINDOW,
    Inbox,
    digest,
    gap_bytes,
    outgoing,
    overhead_bytes,
    stream,
    stream_bytes,
)
from failslow.mitigate.move_wire import GroupWire, Wire, read_word, transfer_group, word

__all__ = ["CHUNK_BYTES", "Moved", "swap_state", "transfer_group"]

CHUNK_BYTES = 4 << 20
"""At 10 Gbit/s some 3 ms; a few are under way at a time."""
VOTE_S = 5.0
"""What a vote may take beyond the time limit: those who ran into it must still say so."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A completed move, as one worker saw it."""

    state: Any
    """Of the new position: the very object given where the worker stays."""
    position: int
    """The new one, row-major over (pp, dp, tp)."""
    sent_bytes: int
    received_bytes: int
    duration_s: float


def swap_state(
    state: Any,
    *,
    placement_now: Sequence[int],
    placement_new: Sequence[int],
    group: dist.ProcessGroup | Wire,
    tp: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    device: torch.device | str | None = None,
    limit_s: float = 60.0,
    free: Callable[[torch.device], int] = free_bytes,
    near: bool = True,
) -> Moved:
    """Hand this worker's state to the next holder of its position; receive the new position's.

    A collective: every worker of the job calls it with the same placements, those that stay too.
    state: a tree of dicts, lists, tuples, numbers, strings, bytes and tensors. It is only read, and
    nothing may write to it meanwhile. placement_now, placement_new: the rank at each position.
    group: of all workers and for this move alone (`transfer_group`), as a failure breaks it.
    device: where accelerator tensors arrive; the worker's own accelerator if left out. "cpu" takes
    the second copy into host memory where the accelerator has no room.
    free: tells how many bytes are free on a device.
    near: what lies in the memory of a worker's own machine is read there, where it may be.

    Raises MoveError, on every living worker: refused (`refused` is true, nothing was sent) for a
    state that cannot travel, placements that do not fit or differ between workers, or too little
    memory; failed for anything else, a dead worker and a time-out among it. `state` is then as it
    was, and the move's group must be destroyed.
    """
    wire = group if not isinstance(group, dist.ProcessGroup) else GroupWire(group)
    start_s = time.monotonic()
    move = _Move(wire, _home(device), chunk_bytes, start_s + limit_s, near=near)
    mine = move.announce(state, placement_now, placement_new, tp=tp, free=free)
    words = _gathered(wire, mine, limit_s)
    _refuse(words)
    _refuse_for_room(words, placement_now, placement_new, chunk_bytes)
    prepared = move.vote(move.prepare(words))
    move.vote(move.transfer(prepared), last=True)
    return Moved(
        state=move.received if move.route.moves else state,
        position=move.route.position_new,
        sent_bytes=sum(spec.size_bytes for spec in move.packed.specs),
        received_bytes=sum(spec.size_bytes for spec in move.inbox.specs),
        duration_s=time.monotonic() - start_s,
    )


def _home(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _Move:
    """One worker's part. Its steps tell of a problem ("" for none) rather than raise: the other
    workers wait for this one's vote."""

    route: Route
    packed: Packed
    inbox: Inbox

    def __init__(
        self,
        wire: Wire,
        home: torch.device,
        chunk_bytes: int,
        deadline_s: float,
        *,
        near: bool,
    ) -> None:
        self.wire, self.home, self.chunk_bytes = wire, home, chunk_bytes
        self.deadline_s = deadline_s
        self.received: Any = None
        self._offer = Offer() if near else None
        self._source_pid: int | None = None
        """Of the source's process, where its memory can be read."""
        self._lent: list[torch.Tensor] = []
        """Chunks that may be read until the last vote is over."""
        self._tree: Any = None
        self._cut_off = False

    def announce(
        self,
        state: Any,
        now: Sequence[int],
        new: Sequence[int],
        *,
        tp: int,
        free: Callable[[torch.device], int],
    ) -> bytes:
        """What all must know of this worker:

        {"plan":…,"manifest":…,"staged":…,"host":{"bytes":…,"free":…,…},"device":{…}} or {"no":…}
        """
        number = plan_number(now, new, self.chunk_bytes)
        try:
            self._check_call(now)
            check_placements(now, new, tp=tp)
            self.route = find_route(self.wire.rank, now=now, new=new)
            self.packed = packed = pack(state if self.route.moves else None)
            kinds = {
                name: {
                    "bytes": packed.size_bytes(on_device=on_device),
                    "bundle": overhead_bytes(packed.specs, on_device=on_device),
                    "gap": gap_bytes(packed.tensors, packed.specs, on_device=on_device),
                    "free": free(where),
                    "place": place_name(where),
                }
                for name, on_device, where in _kinds(self.home)
            }
            staged = any(t.device.type != self.wire.device.type for t in packed.tensors)
            offered = self._offer if readable(packed.tensors) else None
            offer = {} if offered is None else offered.told()
            return word(
                plan=number, manifest=len(packed.manifest), staged=staged, near=offer, **kinds
            )
        except Exception as error:
            return word(no=_told(error), plan=number)

    def _check_call(self, placement: Sequence[int]) -> None:
        if len(placement) != self.wire.size:
            raise MoveError(
                f"the placement has {len(placement)} positions and the group {self.wire.size} "
                "workers; give a group of all workers",
                refused=True,
            )
        if self.chunk_bytes < 1024:
            raise MoveError(f"chunk_bytes is {self.chunk_bytes}; give 1024 or more", refused=True)

    def prepare(self, words: Sequence[Mapping[str, Any]]) -> str:
        """Learn what comes, and take the memory for it."""
        route, source = self.route, self.route.source
        try:
            specs: tuple[TensorSpec, ...] = ()
            if route.moves:
                size = int(words[source]["manifest"])
                if not 0 < size <= MANIFEST_BYTES:
                    raise MoveError(f"rank {source} announces a manifest of {size} bytes")
                text = self._bytes(self.packed.manifest, size)
                self._tree, specs = read_manifest(text)
                _check_size(specs, words[source], source)
                if self._offer is not None and _is_plain(words[source]):
                    theirs = words[source]["near"]
                    self._source_pid = theirs["pid"] if can_read(theirs) else None
            self.inbox = Inbox(specs, self.home, self.chunk_bytes)
        except Exception as error:
            return _told(error)
        return ""

    def transfer(self, prepared: Sequence[Mapping[str, Any]]) -> str:
        """Everything sent, received and compared."""
        try:
            if self.route.moves:
                self._transfer(lends=bool(prepared[self.route.to].get("reads")))
                self.received = unpack(self._tree, self.inbox.tensors)
        except Exception as error:
            return _told(error)
        return ""

    def _transfer(self, *, lends: bool) -> None:
        """lends: whoever takes this worker's place reads its memory."""
        packed, inbox, source = self.packed, self.inbox, self.route.source
        chunks = outgoing(packed.tensors, packed.specs, self.chunk_bytes)
        homes, pid = inbox.chunks(), self._source_pid
        if lends:
            self._lent = list(chunks)
        near = [] if pid is None else list(homes)
        places = self._bytes(addresses(self._lent), 8 * len(near))
        with self._dropping():
            sent, received = stream(self.wire, chunks, homes, self._peers, self.deadline_s)
            if pid is not None:
                received = collect(pid, places, near, self.deadline_s, digest)
        sent = sent or [digest(chunk) for chunk in self._lent]
        theirs = self._bytes(_numbers(sent), 4 * len(received))
        if theirs != _numbers(received):
            pairs = enumerate(received)
            wrong = [i for i, d in pairs if theirs[4 * i : 4 * i + 4] != _numbers([d])]
            raise MoveError(
                f"{len(wrong)} of {len(received)} chunks from rank {source} have another checksum "
                f"than when they left, the first is number {wrong[0]}"
            )
        inbox.unbundle()
        if any(tensor.is_cuda for tensor in inbox.tensors):
            torch.cuda.synchronize()  # a failed copy must show before the vote

    def _bytes(self, mine: bytes, size_in: int) -> bytes:
        with self._dropping():
            return stream_bytes(self.wire, mine, size_in, self._peers, self.deadline_s)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Leave the group where a stream ends early: peers that wait for its rest must know."""
        try:
            yield
        except BaseException:
            self._cut_off = True
            with suppress(Exception):
                self.wire.drop()
            raise

    @property
    def _peers(self) -> tuple[int, int]:
        return self.route.to, self.route.source

    def vote(self, problem: str, *, last: bool = False) -> Sequence[Mapping[str, Any]]:
        """All workers' words where all are well, else MoveError.

        At the last vote workers may see different things: one has everybody's yes, another only
        that its peer is gone. Then the decision is the one entered in the store first.
        """
        limit_s = max(self.deadline_s - time.monotonic(), 0.0) + VOTE_S
        mine = word(no=problem) if problem else word(reads=self._source_pid is not None)
        words: list[dict[str, Any]] = []
        seen = True
        try:
            if self._cut_off:
                raise MoveError(problem)
            words = [read_word(text) for text in self.wire.gather(mine, limit_s)]
            against = next((f"rank {r}: {w['no']}" for r, w in enumerate(words) if "no" in w), "")
        except Exception as error:
            against, seen = problem or f"the vote failed: {_told(error)}", False
        if seen and against:
            raise MoveError(f"nothing was moved: {against}")
        if not last:
            if against:
                raise MoveError(f"nothing was moved: {against}")
            return words
        try:
            agreed = self.wire.settle(commit=not against)
        except Exception as error:
            raise MoveError(
                "nothing was moved here, and the job's store does not tell whether elsewhere: "
                f"{_told(error)}; restart the job"
            ) from error
        if not agreed:
            raise MoveError(
                f"nothing was moved: {against or 'another worker could not see the vote'}"
            )
        return words


# -- what is known before anything is sent -----------------------------------------------------


def _kinds(home: torch.device) -> list[tuple[str, bool, torch.device]]:
    return [("host", False, torch.device("cpu")), ("device", True, home)]


def _refuse_for_room(
    words: Sequence[Mapping[str, Any]], now: Sequence[int], new: Sequence[int], chunk_bytes: int
) -> None:
    """MoveError on every worker alike where one has no room."""
    needs = []
    for rank, mine in enumerate(words):
        source = find_route(rank, now=now, new=new).source
        if source == rank:
            continue
        theirs = words[source]
        by_place: dict[str, int] = {}
        for name, on_device, _ in _kinds(_CPU):
            need = theirs[name]["bytes"] + theirs[name]["bundle"] + mine[name]["bundle"]
            # what has gaps is copied on its way, wherever it lies
            need += mine[name]["gap"] + (WINDOW * chunk_bytes if mine[name]["gap"] else 0)
            if not on_device and (mine["staged"] or theirs["staged"]):
                need += 2 * WINDOW * chunk_bytes
            place = mine[name]["place"]
            by_place[place] = by_place.get(place, 0) + need
        free = {mine[name]["place"]: mine[name]["free"] for name, _, _ in _kinds(_CPU)}
        needs += [Need(rank, place, need, free[place]) for place, need in by_place.items()]
    if reason := lacking(needs):
        raise MoveError(reason, refused=True)


_CPU = torch.device("cpu")


def _is_plain(theirs: Mapping[str, Any]) -> bool:
    """Its state lies in the host's memory as it will arrive: all of it can be read in place."""
    return not theirs["device"]["bytes"] and not theirs["host"]["gap"] and bool(theirs["near"])


def _gathered(wire: Wire, mine: bytes, limit_s: float) -> list[dict[str, Any]]:
    try:
        return [read_word(text) for text in wire.gather(mine, limit_s)]
    except Exception as error:
        raise MoveError(f"not all workers took part in the move: {_told(error)}") from error


def _refuse(words: Sequence[Mapping[str, Any]]) -> None:
    for rank, theirs in enumerate(words):
        if "no" in theirs:
            raise MoveError(f"rank {rank}: {theirs['no']}", refused=True)
    plans = [theirs["plan"] for theirs in words]
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            raise MoveError(
                f"rank {rank} was asked for another move than rank 0; give all workers the same "
                "placements and chunk_bytes",
                refused=True,
            )


def _check_size(specs: Sequence[TensorSpec], theirs: Mapping[str, Any], source: int) -> None:
    """The room that was found is for what was announced."""
    for name, on_device, _ in _kinds(_CPU):
        size = sum(spec.size_bytes for spec in specs if spec.on_device is on_device)
        if size != theirs[name]["bytes"]:
            raise MoveError(
                f"rank {source} announces {theirs[name]['bytes']} bytes and describes {size}"
            )


def _numbers(digests: Sequence[int]) -> bytes:
    return b"".join(digest.to_bytes(4, "little") for digest in digests)


def _told(error: Exception) -> str:
    lines = str(error).splitlines()
    name = "" if isinstance(error, MoveError) else f"{type(error).__name__}: "
    return name + (lines[0] if lines else "")
