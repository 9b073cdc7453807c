"""Workers of one machine read each other's memory instead of sending it: half the copies.

In: what a worker tells of itself before a move, and the addresses of what it hands over. Out: the
bytes, in tensors of this process. It is the "cross-memory attach" of MPI libraries:

    {"pid":4711,"at":140211,"secret":"9f0c…","where":"b1f2…/4026531840"}

Whether it works is tried, not guessed: a secret of the other's memory must be found where it says.
Other namespaces of processes, Yama's or a container's rules, other systems: state is sent as usual.
So it is where the network between the two is another than the loopback interface (`where`): nodes
of a test bed are machines to each other.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from failslow.errors import MoveError

__all__ = ["Offer", "addresses", "can_read", "collect", "readable"]

_SECRET_BYTES = 16
_TRIED = 1024
"""Pieces that one call may read."""


class Offer:
    """This worker's secret, to be found in its memory as long as the object lives."""

    def __init__(self) -> None:
        self._secret = ctypes.create_string_buffer(secrets.token_bytes(_SECRET_BYTES))

    def told(self) -> dict[str, Any]:
        """What the others need to try."""
        return {
            "pid": os.getpid(),
            "at": ctypes.addressof(self._secret),
            "secret": self._secret.raw[:_SECRET_BYTES].hex(),
            "where": _where(),
        }


def _where() -> str:
    """The machine as started, and its network; "" where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def can_read(theirs: Mapping[str, Any]) -> bool:
    """Whether this process can read the memory of the worker that tells this."""
    try:
        if not theirs["where"] or theirs["where"] != _where():
            return False
        found = ctypes.create_string_buffer(_SECRET_BYTES)
        _read(int(theirs["pid"]), int(theirs["at"]), ctypes.addressof(found), _SECRET_BYTES)
        return secrets.compare_digest(found.raw.hex(), str(theirs["secret"]))
    except (OSError, AttributeError, LookupError, TypeError, ValueError, MoveError):
        return False


def readable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all of these can be read in that way at all, as this process tries on itself.

    What a driver has mapped cannot: CUDA's pinned memory, NOT RUN there.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    found = ctypes.create_string_buffer(_TRIED)
    try:
        ends = [at for t in tensors if t.numel() for at in (t.data_ptr(), _last_byte(t))]
        for some in (ends[i : i + _TRIED] for i in range(0, len(ends), _TRIED)):
            into = (_Piece * 1)(_Piece(ctypes.addressof(found), len(some)))
            out = (_Piece * len(some))(*(_Piece(at, 1) for at in some))
            if _call()(os.getpid(), into, 1, out, len(some), 0) != len(some):
                return False
    except (AttributeError, RuntimeError):
        return False
    return True


def _last_byte(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size() - 1


def addresses(chunks: Sequence[torch.Tensor]) -> bytes:
    """Where the chunks lie, 8 bytes each."""
    return b"".join(chunk.data_ptr().to_bytes(8, "little") for chunk in chunks)


def collect(
    pid: int,
    places: bytes,
    homes: Iterable[torch.Tensor],
    deadline_s: float,
    digest: Callable[[torch.Tensor], int],
) -> list[int]:
    """Fill (size,) uint8 tensors of the host's memory from another process; their digests.

    places: as `addresses` gives them, of chunks of the same sizes. deadline_s: on the monotonic
    clock. Raises MoveError past it, or where the other process is gone.
    """
    digests = []
    for number, home in enumerate(homes):
        if time.monotonic() > deadline_s:
            raise MoveError("the time for moving state is over; raise limit_s")
        at = int.from_bytes(places[8 * number : 8 * number + 8], "little")
        try:
            _read(pid, at, home.data_ptr(), home.numel())
        except OSError as error:
            raise MoveError(f"process {pid} of this machine cannot be read: {error}") from error
        digests.append(digest(home))  # while it is in the caches
    return digests


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _read(pid: int, there: int, here: int, size: int) -> None:
    """All of it, or OSError."""
    call, done = _call(), 0
    while done < size:
        into, out = (_Piece(base + done, size - done) for base in (here, there))
        got = call(pid, into, 1, out, 1, 0)
        if got <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += got


def _call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    pieces, number = ctypes.POINTER(_Piece), ctypes.c_ulong
    call.argtypes = (ctypes.c_int, pieces, number, pieces, number, number)
    call.restype = ctypes.c_ssize_t
    return call
