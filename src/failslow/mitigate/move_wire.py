"""What a move needs of the network: bytes to one peer, a word from all, one decision for all.

In: tensors of bytes. Out: the same at another rank. `GroupWire` is the real one, over a process
group of the move's own, since a failed move leaves its group unusable; the training's groups never
notice. `move_fake.ThreadWire` is the in-process one.

    with transfer_group(limit_s=60.0) as group:
        moved = swap_state(state, …, group=group)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from failslow.errors import MoveError

__all__ = ["GroupWire", "Pending", "Wire", "leave", "read_word", "transfer_group", "word"]

WORD_BYTES = 2048
"""What each rank tells all others at once: JSON, padded."""
_REASON = 1200
_COMMIT, _ABORT = "commit", "abort"
_NEVER_SENT = 7  # no bytes of the move carry this tag, so that waiting for it runs out of time


class Pending(Protocol):
    """Bytes under way."""

    def wait(self, limit_s: float) -> None:
        """Until they have left or arrived. Raises what the network raises, and past limit_s."""
        ...


@runtime_checkable
class Wire(Protocol):
    """The seam between a move and the network; `rank` is one of `size`."""

    rank: int
    size: int
    device: torch.device
    """Where the tensors must be that it sends and receives."""

    def post(
        self, outgoing: tuple[torch.Tensor, int] | None, incoming: tuple[torch.Tensor, int] | None
    ) -> tuple[Pending | None, Pending | None]:
        """Begin to send a (size,) uint8 tensor to a rank and to fill one from a rank."""
        ...

    def gather(self, mine: bytes, limit_s: float) -> Sequence[bytes]:
        """The WORD_BYTES of every rank, by rank."""
        ...

    def settle(self, *, commit: bool) -> bool:
        """The one decision for all: that of the rank which asked first."""
        ...

    def drop(self) -> None:
        """Leave: whoever waits for this rank over the wire must learn of it at once."""
        ...


def word(**content: Any) -> bytes:
    """A record for `Wire.gather`: JSON, its `no` (a reason) cut so that it fits."""
    if "no" in content:
        content["no"] = str(content["no"])[:_REASON]
    text = json.dumps(content).encode()
    if len(text) > WORD_BYTES:
        text = json.dumps({"no": "its record is too long"}).encode()
    return text.ljust(WORD_BYTES)


def read_word(text: bytes) -> dict[str, Any]:
    """What another rank told; what cannot be read is a "no"."""
    with suppress(ValueError):
        content = json.loads(text)
        if isinstance(content, dict):
            return content
    return {"no": "its record cannot be read"}


class _GroupPending:
    def __init__(self, work: dist.Work, data: torch.Tensor) -> None:
        self._work = work
        self._data = data  # alive as long as the network reads or fills it

    def wait(self, limit_s: float) -> None:
        if not self._work.wait(timedelta(seconds=max(limit_s, 0.001))):
            raise RuntimeError("the transfer did not complete")


class GroupWire:
    """A process group that spans all workers of the job.

    store: decides between workers of which some saw the vote fail; the job's own if left out.
    """

    _uses: ClassVar[Counter[str]] = Counter()
    """Of each group, by name: all its workers use it equally often, or it fails for all."""

    def __init__(
        self, group: dist.ProcessGroup, *, store: torch._C._distributed_c10d.Store | None = None
    ) -> None:
        self._group = group
        self._store = store
        self.rank = dist.get_rank()
        self.size = dist.get_world_size(group)
        nccl = "nccl" in dist.get_backend(group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else _CPU
        self._uses[group.group_name] += 1
        self._key = f"failslow/move/{group.group_name}/{self._uses[group.group_name]}"

    def post(
        self, outgoing: tuple[torch.Tensor, int] | None, incoming: tuple[torch.Tensor, int] | None
    ) -> tuple[Pending | None, Pending | None]:
        """Both at once: NCCL runs what is posted together at the same time."""
        operations = []
        if incoming is not None:
            operations.append(dist.P2POp(dist.irecv, *incoming, group=self._group))
        if outgoing is not None:
            operations.append(dist.P2POp(dist.isend, *outgoing, group=self._group))
        if self.device.type == "cpu":
            works = [act.op(act.tensor, act.peer, group=self._group) for act in operations]
        else:
            works = dist.batch_isend_irecv(operations)
        # NCCL gives one work for the whole batch
        sent = None if outgoing is None else _GroupPending(works[-1], outgoing[0])
        received = None if incoming is None else _GroupPending(works[0], incoming[0])
        return sent, received

    def gather(self, mine: bytes, limit_s: float) -> Sequence[bytes]:
        """An all-gather of small tensors."""
        record = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(record) for _ in range(self.size)]
        work = dist.all_gather(everyone, record, group=self._group, async_op=True)
        assert work is not None
        _GroupPending(work, record).wait(limit_s)
        return [theirs.cpu().numpy().tobytes() for theirs in everyone]

    def settle(self, *, commit: bool) -> bool:
        """The store's first value counts."""
        store = self._store or dist.distributed_c10d._get_default_store()
        wish = _COMMIT if commit else _ABORT
        return bool(store.compare_set(self._key, "", wish).decode() == _COMMIT)

    def drop(self) -> None:
        """Break the group for all."""
        leave(self._group)


def leave(group: dist.ProcessGroup) -> None:
    """Whoever waits for this worker in the group learns that it does so in vain.

    NCCL is told; gloo closes its connections when a receive runs out of time.
    """
    if "nccl" in dist.get_backend(group):
        group.abort()
        return
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
    me = group.rank()
    for peer in range(group.size()):
        # one that is gone fails at once, which closes no connection but its own
        with suppress(Exception):
            if peer != me:
                work = dist.irecv(nothing, group=group, group_src=peer, tag=_NEVER_SENT)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


_CPU = torch.device("cpu")


@contextmanager
def transfer_group(limit_s: float, *, backend: str | None = None) -> Iterator[dist.ProcessGroup]:
    """A process group of all workers for one move, destroyed afterwards. A collective.

    Raises MoveError where it cannot be made within limit_s, as with a dead worker.
    """
    try:
        group = dist.new_group(
            backend=backend, timeout=timedelta(seconds=limit_s), group_desc="failslow_move"
        )
    except Exception as error:
        raise MoveError(f"no process group to move state over: {error}") from error
    try:
        yield group
    finally:
        # one that failed may be past destroying, and must not hide why
        with suppress(Exception):
            dist.destroy_process_group(group)
