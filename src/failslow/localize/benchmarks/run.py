"""Runs a script in a paused worker.

In: a script (`localize.script`), this worker's rank and device. Out: what it measured, JSON:

    {"do":"gemm","stage":0,"rank":5,"host":"gpu-17","device":"NVIDIA H200","dtype":"float16",
     "size":8192,"seconds":0.00161,…,"error":""}
    {"do":"host","stage":1,"rank":5,"what":"memory","seconds":0.0021,…}
    {"do":"p2p","stage":2,"rank":0,"peer":2,"by":2,"size_bytes":4194304,"seconds":0.034,…}

It never raises and never outlasts its limits; what went wrong is in the results. The trainer finds
everything as it was: random numbers, default type and device, grad mode, threads, streams. Its
store gains a few keys; its process groups are not used.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from failslow.capture import hook
from failslow.localize.benchmarks.compute import check_host, gemm
from failslow.localize.benchmarks.helper import Helper, Lost
from failslow.localize.benchmarks.meeting import Meeting, NoMeeting
from failslow.localize.benchmarks.place import device_model
from failslow.localize.benchmarks.transfer import Channel, open_channel, receive_all, send_all
from failslow.localize.script_wire import members

__all__ = ["run_script"]

_CONNECT_S = 0.5
_DRAIN_S = 2.0
"""What the device may take to finish what the trainer gave it."""
_CLOSE_S = 0.5


def run_script(
    script: Sequence[Mapping[str, Any]],
    *,
    rank: int,
    world_size: int,
    store_or_group: Any = None,
    device: torch.device | str | None = None,
    name: str = "0",
    within_s: float = 4.6,
) -> list[dict[str, Any]]:
    """Walk through a script; every rank in it calls this at about the same time.

    store_or_group: the training's store, one of its process groups, or None for the default one.
    device: None = the current CUDA device if there is one, else the CPU. name: of the pause, the
    same on all ranks and never used before. within_s: after so many seconds what is left is not
    begun. Returns the results of this rank; a rank in no stage returns at once.
    """
    try:
        if not any(rank in members(stage) for stage in script):
            return []
        with hook.quiet():
            run = _Run(rank, world_size, _device(device), time.perf_counter() + within_s)
            return run.walk(script, store_or_group, name)
    except Exception as error:  # the trainer goes on, whatever it is
        return [{"do": "all", "rank": rank, "error": _text(error)}]


class _Run:
    """One worker's walk."""

    def __init__(self, rank: int, world_size: int, device: torch.device, end_s: float) -> None:
        self.rank, self.world_size, self.device, self.end_s = rank, world_size, device, end_s
        self.about = {"host": socket.gethostname(), "device": device_model(device)}
        self.results: list[dict[str, Any]] = []
        self.channels: dict[int, tuple[int, Channel]] = {}
        """{peer: (the stage it was made in, channel)}"""
        self.meeting: Meeting | None = None
        self.why_no_meeting = ""

    def walk(
        self, script: Sequence[Mapping[str, Any]], store_or_group: Any, name: str
    ) -> list[dict[str, Any]]:
        helper = Helper("failslow-benchmarks")
        try:
            with _own_settings(self.device):
                self._drain(helper)
                last = max(i for i, stage in enumerate(script) if self.rank in members(stage))
                script = script[: last + 1]
                if any(set(_awaited(stage)) - {self.rank} for stage in script):
                    self._meet(store_or_group, name, helper)
                for index, stage in enumerate(script):
                    self._stage(index, stage)
                self._close(helper)
        finally:
            helper.end()
        return self.results

    def _meet(self, store_or_group: Any, name: str, helper: Helper) -> None:
        """Only who waits for others, or is waited for: the store serves all at once."""
        try:
            self.meeting = Meeting(
                store_or_group, name=name, rank=self.rank, helper=helper, limit_s=_CONNECT_S
            )
        except NoMeeting as error:
            self.why_no_meeting = str(error)

    def _drain(self, helper: Helper) -> None:
        """Let the trainer's own work on the device end first."""
        if self.device.type == "cuda":
            device = self.device
            helper.call(
                lambda: torch.cuda.synchronize(device), limit_s=_DRAIN_S, what=f"{device} is busy"
            )

    def _stage(self, index: int, stage: Mapping[str, Any]) -> None:
        takes_part, awaited = self.rank in members(stage), _awaited(stage)
        until_s = min(self.end_s, time.perf_counter() + float(stage.get("limit_s", 1.0)))
        if takes_part:
            try:
                if time.perf_counter() >= self.end_s:
                    raise TimeoutError("no time was left for it")
                for result in self._measure(index, stage, until_s):
                    self._tell(index, stage, result)
            except Exception as error:  # one stage less
                self._tell(index, stage, {"seconds": None, "error": _text(error)})
        if self.meeting is not None and awaited:
            # the last one, too: others may wait for it
            try:
                if takes_part:
                    self.meeting.finish(index)
                self.meeting.await_others(index, awaited, until_s - time.perf_counter())
            except (Lost, RuntimeError) as error:
                self.meeting, self.why_no_meeting = None, _text(error)

    def _tell(self, index: int, stage: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        who = {"rank": self.rank}
        if pair := _pair(stage, self.rank):
            who = {"rank": pair[0], "peer": pair[1], "by": self.rank}
        kind = {"do": str(stage.get("do")), "stage": index}
        self.results.append({**kind, **who, **self.about, "error": "", **result})

    def _measure(
        self, index: int, stage: Mapping[str, Any], until_s: float
    ) -> list[dict[str, Any]]:
        what, left_s = stage.get("do"), until_s - time.perf_counter()
        if what == "gemm":
            return [
                gemm(
                    dtype=str(stage["dtype"]),
                    size=int(stage["size"]),
                    repeats=int(stage.get("repeats", 5)),
                    least_s=min(float(stage.get("least_s", 0.1)), 0.8 * left_s),
                    limit_s=left_s,
                    device=self.device,
                )
            ]
        if what == "host":
            return check_host(limit_s=left_s)
        if what == "p2p":
            return self._transfer(index, stage, until_s)
        raise ValueError(f"{what!r} is no benchmark; there are gemm, host and p2p")

    def _transfer(
        self, index: int, stage: Mapping[str, Any], until_s: float
    ) -> list[dict[str, Any]]:
        pair = _pair(stage, self.rank)
        assert pair is not None
        sender, receiver = pair
        peer = receiver if self.rank == sender else sender
        device = self.device if self.device.type == "cuda" else torch.device("cpu")
        channel = self._channel(index, peer, until_s, device)
        sizes = [int(size) for size in stage["sizes_bytes"]]
        broken = True
        try:
            if self.rank == sender:
                sent = send_all(channel, sizes_bytes=sizes, until_s=until_s, device=device)
                broken = bool(sent["error"])
                return [sent]
            results = receive_all(
                channel,
                sizes_bytes=sizes,
                repeats=int(stage.get("repeats", 3)),
                until_s=until_s,
                device=device,
            )
            broken = any(result["error"] for result in results)
            return results
        finally:
            if broken:  # what is still under way in it must not be taken for the next stage's
                made_in, channel = self.channels.pop(peer)
                channel.close()
                with contextlib.suppress(Lost, RuntimeError):
                    if self.meeting is not None:
                        self.meeting.give_up(peer, made_in)

    def _channel(self, index: int, peer: int, until_s: float, device: torch.device) -> Channel:
        if self.meeting is None:
            raise NoMeeting(self.why_no_meeting)
        if not 0 <= peer < self.world_size:
            raise ValueError(f"rank {peer} is not in a job of {self.world_size}")
        if (known := self.channels.get(peer)) is not None:
            made_in, channel = known
            if not self.meeting.is_given_up(peer, made_in):
                return channel
            del self.channels[peer]
            channel.close()
        side = int(self.rank > peer)

        def make(store: Any, limit_s: float) -> Channel:
            return open_channel(store, side, limit_s, device)

        channel = self.meeting.connect(peer, index, make, until_s - time.perf_counter())
        self.channels[peer] = index, channel
        return channel

    def _close(self, helper: Helper) -> None:
        """Take connections down where a hang hurts nobody."""

        def close() -> None:
            while self.channels:
                self.channels.popitem()[1][1].close()

        with contextlib.suppress(Lost, RuntimeError):
            helper.call(close, limit_s=_CLOSE_S, what="closing connections")
            if self.meeting is not None:
                self.meeting.close()


@contextlib.contextmanager
def _own_settings(device: torch.device) -> Iterator[None]:
    """What the trainer has set does not change our benchmarks.

    All of it is of this thread: a script left behind must not change training that goes on. So the
    benchmarks have generators and types of their own, too.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    cuda: Any = torch.cuda  # untyped
    if cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _awaited(stage: Mapping[str, Any]) -> list[int]:
    """Those who must be through before the next stage begins."""
    return members(stage) if stage.get("wait", True) else []


def _pair(stage: Mapping[str, Any], rank: int) -> tuple[int, int] | None:
    """(sender, receiver) of a rank's transfer in a stage."""
    for sender, receiver in stage.get("pairs", ()):
        if rank in (sender, receiver):
            return sender, receiver
    return None


def _text(error: BaseException) -> str:
    text = str(error).splitlines()
    return (text[0] if text else type(error).__name__)[:300]
