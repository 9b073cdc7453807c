"""A state's bytes in chunks, both ways at once, with a checksum for each.

In: the tensors to send, and the specs of those that come. Out: the received tensors, and whether
every chunk arrived as it left. A few chunks are under way at a time (`WINDOW`); small tensors
travel together, as a thousand messages of four bytes cost more than the bytes. Both sides cut the
same way, from the specs alone.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from failslow.errors import MoveError
from failslow.mitigate.move_pack import TensorSpec, allocate, is_gapless, physical
from failslow.mitigate.move_wire import Pending, Wire

__all__ = [
    "WINDOW",
    "Inbox",
    "digest",
    "gap_bytes",
    "outgoing",
    "overhead_bytes",
    "stream",
    "stream_bytes",
]

WINDOW = 4
"""Chunks under way at a time, each way."""
SMALL = 64 << 10
"""Tensors below this travel in bundles."""
_ROW = 8192


def digest(chunk: torch.Tensor) -> int:
    """32 bits that tell a (size,) uint8 chunk from one that was damaged or is another.

    The sums of its 8-byte words that lie 64 KB apart, by CRC: one pass at memory speed. Blind only
    for what changes several words of one sum so that they make up for each other. Any device gives
    the same.
    """
    whole = chunk.numel() - chunk.numel() % (8 * _ROW)
    crc = zlib.crc32(chunk[whole:].cpu().numpy().data)
    if not whole:
        return crc
    if chunk.device.type == "cpu":
        words: NDArray[np.int64] = chunk.numpy()[:whole].view(np.int64).reshape(-1, _ROW)
        return zlib.crc32(words.sum(axis=0).data, crc)
    return zlib.crc32(_sums_there(chunk[:whole]).numpy().data, crc)


def _sums_there(data: torch.Tensor) -> torch.Tensor:
    """The same on an accelerator: only the sums come to the host."""
    # words must begin at a multiple of their size
    aligned = data if data.data_ptr() % 8 == 0 else data.clone()
    return aligned.view(torch.int64).view(-1, _ROW).sum(dim=0).cpu()


def _bundles(specs: Sequence[TensorSpec]) -> list[list[int]]:
    """Numbers of the small tensors, those of the host's memory and those on the device."""
    small = [i for i, spec in enumerate(specs) if 0 < spec.size_bytes < SMALL]
    return [[i for i in small if specs[i].on_device is where] for where in (False, True)]


def overhead_bytes(specs: Sequence[TensorSpec], *, on_device: bool) -> int:
    """Memory a bundle of these takes."""
    bundle = _bundles(specs)[on_device]
    return sum(specs[i].size_bytes for i in bundle)


def gap_bytes(
    tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], *, on_device: bool
) -> int:
    """Largest copy made on the way because a tensor does not lie in one piece."""
    pairs = [(t, s) for t, s in zip(tensors, specs, strict=True) if s.on_device is on_device]
    return max((spec.size_bytes for t, spec in pairs if not is_gapless(t, spec)), default=0)


def _cut(data: torch.Tensor, chunk_bytes: int) -> Iterator[torch.Tensor]:
    for at in range(0, data.numel(), chunk_bytes):
        yield data[at : at + chunk_bytes]


def outgoing(
    tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], chunk_bytes: int
) -> Iterator[torch.Tensor]:
    """The chunks to send, (size,) uint8 each; made as they are asked for."""
    for bundle in _bundles(specs):
        if bundle:
            yield from _cut(
                torch.cat([physical(tensors[i], specs[i]) for i in bundle]), chunk_bytes
            )
    for tensor, spec in zip(tensors, specs, strict=True):
        if spec.size_bytes >= SMALL:
            yield from _cut(physical(tensor, spec), chunk_bytes)


class Inbox:
    """Memory for the tensors that come, all of it taken at once. Raises when there is too little.

    device: of those that belong on an accelerator.
    """

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device, chunk_bytes: int) -> None:
        self.specs = tuple(specs)
        self.tensors = [allocate(spec, device) for spec in specs]
        self._chunk_bytes = chunk_bytes
        self._bundles = []
        for numbers in _bundles(specs):
            if numbers:
                size = sum(specs[i].size_bytes for i in numbers)
                where = self.tensors[numbers[0]].device
                self._bundles.append((numbers, torch.empty(size, dtype=torch.uint8, device=where)))

    def chunks(self) -> Iterator[torch.Tensor]:
        """Where the chunks go, in the order in which `outgoing` sends them."""
        for _, bundle in self._bundles:
            yield from _cut(bundle, self._chunk_bytes)
        for tensor, spec in zip(self.tensors, self.specs, strict=True):
            if spec.size_bytes >= SMALL:
                yield from _cut(physical(tensor, spec), self._chunk_bytes)

    def unbundle(self) -> None:
        """Small tensors out of their bundles; once everything is here."""
        for numbers, bundle in self._bundles:
            at = 0
            for i in numbers:
                size = self.specs[i].size_bytes
                physical(self.tensors[i], self.specs[i]).copy_(bundle[at : at + size])
                at += size
        self._bundles = []


class _Sent:
    def __init__(self, pending: Pending | None) -> None:
        self._pending = pending

    def finish(self, limit_s: float) -> None:
        if self._pending is not None:
            self._pending.wait(limit_s)


class _Received:
    """A chunk on its way, perhaps over a staging buffer."""

    def __init__(self, pending: Pending | None, buffer: torch.Tensor, home: torch.Tensor) -> None:
        self._pending, self._buffer, self._home = pending, buffer, home

    def finish(self, limit_s: float) -> int:
        if self._pending is not None:
            self._pending.wait(limit_s)
        if self._buffer is not self._home:
            self._home.copy_(self._buffer)
        return digest(self._home)


def stream(
    wire: Wire,
    chunks_out: Iterable[torch.Tensor],
    chunks_in: Iterable[torch.Tensor],
    peers: tuple[int, int],
    deadline_s: float,
) -> tuple[list[int], list[int]]:
    """Send all of one while filling all of the other. Returns the digests (sent, received).

    peers: ranks (to send to, to receive from). deadline_s: on the monotonic clock. Raises what the
    network raises, and MoveError past it.
    """
    to, source = peers
    out, into = iter(chunks_out), iter(chunks_in)
    digests_out: list[int] = []
    digests_in: list[int] = []
    sending: deque[_Sent] = deque()
    receiving: deque[_Received] = deque()
    while True:
        piece, home = next(out, None), next(into, None)
        if piece is not None or home is not None:
            staged = None if piece is None else piece.to(wire.device)
            buffer = None
            if home is not None:
                there = home.device == wire.device
                buffer = home if there else torch.empty_like(home, device=wire.device)
            sent, received = wire.post(
                None if staged is None else (staged, to),
                None if buffer is None else (buffer, source),
            )
            if piece is not None:
                sending.append(_Sent(sent))
                digests_out.append(digest(piece))  # while it travels
            if home is not None and buffer is not None:
                receiving.append(_Received(received, buffer, home))
        elif not sending and not receiving:
            return digests_out, digests_in
        full = piece is None and home is None
        if receiving and (full or len(receiving) >= WINDOW):
            digests_in.append(receiving.popleft().finish(_left_s(deadline_s)))
        if sending and (full or len(sending) >= WINDOW):
            sending.popleft().finish(_left_s(deadline_s))


def stream_bytes(
    wire: Wire, mine: bytes, size_in: int, peers: tuple[int, int], deadline_s: float
) -> bytes:
    """Send bytes and receive `size_in` of them; unchecked."""
    data = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else _NOTHING
    home = torch.empty(size_in, dtype=torch.uint8, device="cpu")  # whatever the default is
    chunk = 1 << 20
    stream(wire, _cut(data, chunk), _cut(home, chunk), peers, deadline_s)
    return home.numpy().tobytes()


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0.0:
        raise MoveError("the time for moving state is over; raise limit_s")
    return left_s
