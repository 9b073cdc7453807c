"""What the hook records of the calls, waits, steps and groups of this process: one rank."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="capture needs torch")

import torch
import torch.distributed as dist
from hooked import records, world
from torch._C._distributed_c10d import HashStore

from failslow.capture import hook, layout, status
from failslow.capture.layout import (
    CALL,
    FLAG_ASYNC,
    FLAG_ERROR,
    OPTIMIZER_STEP,
    TRAINER_STEP,
    WAIT,
)
from failslow.capture.ops import dispatcher_ops
from failslow.capture.reader import RingReader

pytest_plugins = ("hooked",)


def test_all_collectives_of_this_torch_can_be_read() -> None:
    known, missed = dispatcher_ops()
    assert missed == []
    assert set(known) == {name for name in layout.OPS if name}


# ---- what is recorded, and what is not


def test_a_blocking_call_is_one_record_with_its_wait(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    before = time.monotonic_ns()
    dist.all_reduce(torch.ones(8))
    after = time.monotonic_ns()
    (one,) = watched().read().records
    assert before < one["start_ns"] < one["start_ns"] + one["call_ns"] <= one["end_ns"] < after
    assert one["wait_ns"] <= one["end_ns"] - one["start_ns"]
    assert one["thread"] == threading.get_native_id()


def test_a_call_nobody_waited_for_is_written_by_the_next_event(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    kept = dist.all_reduce(torch.ones(8), async_op=True)
    reader = watched()
    dist.barrier()
    assert len(records(reader)) == 2
    kept.wait()
    (wait,) = records(reader, WAIT)
    assert wait["size_bytes"] == 1


def test_what_a_signals_handler_raises_while_a_group_is_met_reaches_the_caller(
    gloo: None, folder: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = hook.install(mode)
    with monkeypatch.context() as patched:
        patched.setattr(recorder, "open", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(8))
    dist.all_reduce(torch.ones(8))
    assert hook.status()["records"] == 1
    assert hook.status()["faults"] == {}


def test_the_hook_keeps_no_tensor_alive_past_the_next_call(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    tensor = torch.ones(8)
    gone: list[bool] = []
    weakref.finalize(tensor, gone.append, True)
    dist.all_reduce(tensor, async_op=True).wait()
    del tensor
    dist.barrier()
    gc.collect()
    assert gone


def test_every_thread_has_its_own_unfinished_call(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    def work() -> None:
        for _ in range(50):
            dist.all_reduce(torch.ones(8), group=group)

    group = dist.new_group([0])
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = records(watched())
    assert len(calls) == 200
    assert len(np.unique(calls["thread"])) == 4
    assert (calls["end_ns"] > calls["start_ns"]).all()


def test_our_own_collectives_are_not_recorded(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    dist.all_reduce(torch.ones(8))
    with hook.quiet():
        dist.all_reduce(torch.ones(9))
    dist.all_reduce(torch.ones(10))
    assert records(watched())["size_bytes"].tolist() == [32, 40]


def test_steps_of_optimizers_and_of_the_trainer_are_boundaries(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    one, two = torch.optim.SGD([weights], lr=0.1), torch.optim.AdamW([weights], lr=0.1)
    one.step()  # before the first collective there is nothing to bound
    dist.all_reduce(torch.ones(1))
    for optimizer in (one, two, one):
        optimizer.step()
    hook.mark_step(41)
    got = watched().read().records[1:]
    assert got["kind"].tolist() == [OPTIMIZER_STEP] * 3 + [TRAINER_STEP]
    assert got["size_bytes"].tolist() == [0, 1, 0, 41]
    assert (np.diff(got["start_ns"]) > 0).all()


def test_a_trainer_that_begins_bounds_its_first_iteration(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    """What that repeats, FSDP's gathers in each micro-batch say, is no iteration."""
    hook.begin_steps(7)
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    hook.mark_step(7)
    hook.begin_steps(8)  # has been begun with
    got = watched().read().records
    assert got["kind"].tolist() == [TRAINER_STEP, CALL, CALL, TRAINER_STEP]
    assert got["size_bytes"][[0, 3]].tolist() == [6, 7]


def test_a_failing_collective_raises_its_own_error_and_is_recorded(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    with pytest.raises(RuntimeError, match="invalid tensor size at index 0"):
        world().allreduce([torch.ones(2), torch.ones(3)])
    (failed,) = records(watched())
    assert failed["flags"] == FLAG_ERROR


# ---- groups


def test_a_group_made_again_keeps_its_number_and_a_new_one_gets_its_own(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    dist.all_reduce(torch.ones(1))
    for desc in ("a", "a", "b"):
        group = dist.new_group([0], group_desc=desc)
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        del group
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    reader = watched()
    names = {group.number: (group.name, group.desc) for group in reader.groups()}
    used = [names[number] for number in records(reader)["group"].tolist()]
    assert used == [
        ("0", "default_pg"), ("1", "a"), ("2", "a"), ("3", "b"), ("0", "default_pg"),
    ]  # fmt: skip
    assert all(group.ranks == (0,) for group in reader.groups())


# ---- faults and modes


def test_a_fault_of_ours_costs_the_sample_only(folder: Path, gloo: None) -> None:
    recorder = hook.install("dispatcher")
    dist.all_reduce(torch.ones(1))
    good = recorder.append

    def broken(*_: int) -> int:
        raise OverflowError("does not fit")

    recorder.append = broken
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    hook.mark_step(1)
    recorder.append = good
    dist.all_reduce(tensor)
    reader = RingReader(next(folder.glob("*.ring")))
    assert records(reader)["size_bytes"].tolist() == [4, 8]
    assert reader.faults == 3
    assert "does not fit" in next(iter(status()["faults"]))


def test_python_mode_sees_the_same_calls_and_says_what_it_misses(folder: Path, gloo: None) -> None:
    seen = {}
    for mode in ("dispatcher", "python"):
        hook.install(mode)
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(4), 0)
        gathered = [torch.ones(5)]
        dist.all_gather(gathered, torch.ones(5), async_op=True).wait()
        dist.reduce_scatter(torch.ones(2), [torch.ones(2)])
        dist.barrier()
        dist.monitored_barrier()
        with pytest.raises(RuntimeError, match="invalid tensor size"):
            world().allreduce([torch.ones(2), torch.ones(3)])
        got = records(RingReader(next(folder.glob("*.ring"))))
        names = ["op", "size_bytes", "dtype", "group", "group_size", "peer", "thread", "flags"]
        got["flags"] &= np.uint8(0xFF & ~FLAG_ASYNC)  # python mode cannot tell
        seen[mode] = [tuple(row[name].item() for name in names) for row in got]
        now = status()
        assert (now["mode"], now["active"], now["faults"]) == (mode, True, {})
        assert bool(now["missed"]) == (mode == "python")
        hook.uninstall()
        dist.all_reduce(torch.ones(3))  # torch's methods are its own again
    assert len(seen["python"]) == 7
    assert all(calls == seen["python"] for calls in seen.values())
