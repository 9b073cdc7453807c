"""The hook inside this process: one rank, real torch, collectives that complete late."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs torch")

import torch.distributed as dist  # noqa: E402  # only where torch is there
from torch._C._distributed_c10d import HashStore  # noqa: E402

from failslow.capture import hook, layout, status  # noqa: E402
from failslow.capture.autoload import autoload  # noqa: E402
from failslow.capture.calls import CallJoiner  # noqa: E402
from failslow.capture.completion import Completions  # noqa: E402
from failslow.capture.layout import (  # noqa: E402
    CALL,
    DONE,
    FLAG_ASYNC,
    FLAG_ERROR,
    OPTIMIZER_STEP,
    TRAINER_STEP,
    WAIT,
)
from failslow.capture.native import build, extension_path  # noqa: E402
from failslow.capture.ops import dispatcher_ops  # noqa: E402
from failslow.capture.reader import RingReader  # noqa: E402
from failslow.errors import CaptureError  # noqa: E402

LATE_S = 0.12
c10d: Any = torch._C._distributed_c10d


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAILSLOW_CAPTURE_FOLDER", str(tmp_path))
    monkeypatch.setenv("FAILSLOW_JOB", "unit")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    return tmp_path


@pytest.fixture
def gloo() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def late_group() -> Iterator[None]:
    """Rank 0 of four over the fake backend; what the collectives do, the tests register."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers "fake"

    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def needs(mode: str) -> str:
    """`mode`, unless this machine has no built extension to be native with."""
    if mode == "native" and not extension_path().exists():
        pytest.skip("the extension is not built: python -m failslow.capture.native")
    return mode


@pytest.fixture(params=["native", "dispatcher"])
def mode(request: pytest.FixtureRequest) -> str:
    return needs(request.param)


@pytest.fixture
def watched(folder: Path, mode: str) -> Iterator[Callable[[], RingReader]]:
    """The hook, installed; the value opens the ring, once there is one."""
    hook.install(mode)
    yield lambda: RingReader(next(folder.glob("*.ring")))
    hook.uninstall()


@contextmanager
def replaced(key: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """Within it `kernel` is what all_reduce does on devices of dispatch key `key`."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there was a kernel before: it is meant
        library.impl("allreduce_", kernel, key)
    yield
    library._destroy()


class LateStream:
    """What a stream does with collectives: takes them at once, completes one after the other.

    `completed_ns` lists when each really completed, by this host's clock.
    """

    def __init__(self) -> None:
        self.completed_ns: list[int] = []
        self._free = 0.0

    def allreduce(self, tensors: Any, *_: Any) -> Any:
        future: Any = torch.futures.Future()
        self._free = max(self._free, time.monotonic()) + LATE_S

        def complete() -> None:
            self.completed_ns.append(time.monotonic_ns())
            future.set_result(tensors)

        threading.Timer(self._free - time.monotonic(), complete).start()
        return tensors, c10d._create_work_from_future(future).boxed()


class LateDevice:
    """The same on a device with events: marks are moments of its queue, kept by its clock."""

    def __init__(self) -> None:
        self._free_ns = 0
        self.capturing = False

    def allreduce(self, tensors: Any, *_: Any) -> Any:
        self._free_ns = max(self._free_ns, time.monotonic_ns()) + int(LATE_S * 1e9)
        future: Any = torch.futures.Future()
        future.set_result(tensors)  # as on CUDA: its callbacks run when it is enqueued
        return tensors, c10d._create_work_from_future(future).boxed()

    def mark(self) -> Any:
        return None if self.capturing else max(self._free_ns, time.monotonic_ns())

    def reached(self, event: Any) -> bool:
        return bool(time.monotonic_ns() >= event)

    def elapsed_ns(self, earlier: Any, later: Any) -> int:
        return int(later - earlier)


def world() -> Any:
    return dist.group.WORLD


def records(reader: RingReader, *kinds: int) -> np.ndarray:
    got = reader.read().records
    return got[np.isin(got["kind"], kinds or (CALL,))]


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def collect(reader: RingReader, done: int) -> np.ndarray:
    """Everything up to the `done`th completion, calls joined."""
    got: list[np.ndarray] = []

    def enough() -> bool:
        got.append(reader.read().records)
        return sum(int((part["kind"] == DONE).sum()) for part in got) >= done

    until(enough)
    return CallJoiner(hold_ns=0).update(np.concatenate(got), now_ns=time.monotonic_ns())


# ---- every operator of this torch


def test_all_collectives_of_this_torch_can_be_read() -> None:
    known, missed = dispatcher_ops()
    assert missed == []
    assert set(known) == {name for name in layout.OPS if name}


# ---- completions: enqueueing is not transferring


def test_enqueueing_is_never_taken_for_a_duration(
    late_group: None, watched: Callable[[], RingReader]
) -> None:
    with replaced("CPU", LateStream().allreduce):
        dist.all_reduce(torch.ones(1))  # makes the ring and the first thread
        reader = watched()
        assert len(records(reader)) == 1
        work = dist.all_reduce(torch.ones(4), async_op=True)
        hook.mark_step(0)
        (call,) = records(reader)
        assert call["call_ns"] < LATE_S * 1e9 / 2, "the fake group must return at once"
        joined = CallJoiner(hold_ns=0).update(np.array([call]), now_ns=time.monotonic_ns())
        assert joined["duration_ns"].tolist() == [-1]
        assert joined["end_ns"].tolist() == [0]
        work.wait()
    (wait,) = records(reader, WAIT)
    assert wait["size_bytes"] == call["seq"]
    assert wait["wait_ns"] > LATE_S * 1e9 / 4


def test_while_profiling_a_late_collective_has_its_true_duration(
    late_group: None, watched: Callable[[], RingReader]
) -> None:
    stream = LateStream()
    with replaced("CPU", stream.allreduce):
        dist.all_reduce(torch.ones(1))  # makes the ring
        reader = watched()
        assert len(records(reader)) == 1
        reader.set_profile(True)
        for _ in range(3):
            dist.all_reduce(torch.ones(4), async_op=True)  # nobody waits, as in DDP's reducer
        calls = collect(reader, done=3)
    assert calls["size_bytes"].tolist() == [16, 16, 16]
    assert (calls["call_ns"] < LATE_S * 1e9 / 2).all()
    expected = np.array(stream.completed_ns[1:]) - calls["start_ns"]
    np.testing.assert_allclose(calls["duration_ns"], expected, atol=LATE_S * 1e9 / 4)
    assert (np.diff(calls["duration_ns"]) > LATE_S * 1e9 / 2).all(), "the queue is in them"


def test_on_a_device_with_events_the_queue_is_not_in_the_durations(
    folder: Path, late_group: None, mode: str
) -> None:
    device = LateDevice()
    hook.install(mode, device=device)
    try:
        with replaced("Meta", device.allreduce):  # a tensor that is not on the CPU
            dist.all_reduce(torch.ones(4, device="meta"))
            reader = RingReader(next(folder.glob("*.ring")))
            reader.set_profile(True)
            for _ in range(3):
                dist.all_reduce(torch.ones(4, device="meta"), async_op=True)
            device.capturing = True  # a CUDA graph: events would become part of it
            dist.all_reduce(torch.ones(4, device="meta"), async_op=True)
            calls = collect(reader, done=3)
    finally:
        hook.uninstall()
    durations = calls["duration_ns"][calls["duration_ns"] >= 0]
    np.testing.assert_allclose(durations, [LATE_S * 1e9] * 3, rtol=0.1)
    assert (calls["call_ns"] < LATE_S * 1e9 / 2).all()


def test_in_python_no_completion_is_asked_for_without_profiling(folder: Path, gloo: None) -> None:
    hook.install("dispatcher")
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    assert not len(records(RingReader(next(folder.glob("*.ring"))), DONE))
    assert "failslow" not in {thread.name for thread in threading.enumerate()}
    hook.uninstall()


def test_a_backend_without_futures_is_asked_by_a_thread_that_ends() -> None:
    class Work:
        finished = False

        def get_future(self) -> Any:
            raise RuntimeError("not implemented")

        def is_completed(self) -> bool:
            return self.finished

    done: list[tuple[Any, int, int]] = []
    completions = Completions(lambda *news: done.append(news), LateDevice())
    first, second = Work(), Work()
    for name, work in (("first", first), ("second", second)):
        completions.follow(name, work, None, on_cpu=True, polls=True)
    completions.follow("gloo", Work(), None, on_cpu=True, polls=False)
    second.finished = True
    until(lambda: len(done) == 1)
    first.finished = True
    until(lambda: len(done) == 2)
    assert [name for name, _, _ in done] == ["second", "first"]
    assert done[0][2] < done[1][2]
    completions.stop()
    assert "failslow" not in {thread.name for thread in threading.enumerate()}


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


# ---- installing, failing open, leaving


def test_installing_twice_is_installing_once_and_leaving_restores_torch(
    folder: Path, gloo: None, mode: str
) -> None:
    wait = dist.Work.wait
    recorder = hook.install(mode)
    assert hook.install() is recorder
    assert dist.Work.wait is not wait
    dist.all_reduce(torch.ones(1))
    assert hook.status()["records"] == 1
    assert len(list(folder.iterdir())) == 1
    hook.uninstall()
    assert dist.Work.wait is wait
    assert list(folder.iterdir()) == []
    dist.all_reduce(torch.ones(1))
    assert status()["mode"] == "off"


def test_no_ring_is_made_before_the_first_collective(folder: Path, mode: str) -> None:
    hook.install(mode)
    torch.ones(3).sum()
    hook.uninstall()
    assert list(folder.iterdir()) == []


def test_without_room_for_a_ring_training_goes_on_and_the_reason_is_told(
    folder: Path,
    gloo: None,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILSLOW_CAPTURE_FOLDER", str(folder / "missing"))
    hook.install(mode)
    tensor = torch.ones(2)
    for _ in range(3):
        dist.all_reduce(tensor)
    told = capfd.readouterr().err
    now = status()
    hook.uninstall()
    assert tensor.tolist() == [1, 1]
    assert not now["active"]
    assert "no room for a ring" in now["reason"]
    assert told.count("this worker is not watched: no room for a ring") == 1


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
    hook.uninstall()


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
    assert len(seen["python"]) == 7
    assert all(calls == seen["python"] for calls in seen.values())


def test_an_unknown_mode_is_named(folder: Path) -> None:
    with pytest.raises(Exception, match="FAILSLOW_CAPTURE_MODE = 'magic' must be"):
        hook.install("magic")
    assert status()["mode"] == "off"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_extension_builds_where_it_is_missing_and_is_refused_if_others_can_write_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(CaptureError, match=r"is not built; run python -m failslow.capture.native"):
        hook.install("native")
    path = build()
    assert build() == path
    hook.install()
    assert status()["mode"] == "native"
    hook.uninstall()
    path.chmod(0o777)
    with pytest.raises(CaptureError, match="can be written by others; remove it"):
        hook.install("native")
    hook.install()
    assert status()["mode"] == "dispatcher"
    hook.uninstall()


def test_without_a_compiler_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    with pytest.raises(CaptureError, match="no-such-compiler was not found; install one or set"):
        build(environ)


# ---- autoload


@pytest.mark.parametrize(
    ("failslow", "rank"), [("", "0"), ("0", "0"), ("off", "0"), ("1", ""), (None, "0"), ("1", None)]
)
def test_without_being_asked_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, failslow: str | None, rank: str | None
) -> None:
    for name, value in (("FAILSLOW", failslow), ("RANK", rank)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    autoload()
    assert status()["mode"] == "off"


def test_autoload_never_raises_and_says_why_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILSLOW", "1")
    monkeypatch.setenv("FAILSLOW_CAPTURE_MODE", "magic")
    autoload()
    assert "this worker is not watched: FAILSLOW_CAPTURE_MODE = 'magic'" in capfd.readouterr().err
    monkeypatch.delenv("FAILSLOW_CAPTURE_MODE")
    autoload()
    assert status()["active"]
    hook.uninstall()


def test_importing_torch_hooks_a_worker_quickly_and_without_the_heavy_parts(folder: Path) -> None:
    probe = (
        "import sys, time, importlib, torch\n"
        "light = [n for n in sys.modules if n.startswith('failslow')]\n"
        "from failslow.capture import status\n"
        "assert status()['active'], status()\n"
        "heavy = {'failslow.records', 'failslow.capture.reader', 'pydantic', 'scipy', 'plotly'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from failslow.capture import hook\n"
        "hook.uninstall()\n"
        "mine = [n for n in sys.modules if n.startswith('failslow')]\n"
        "times = []\n"
        "for _ in range(5):\n"
        "    for n in mine: del sys.modules[n]\n"
        "    start = time.thread_time()\n"
        "    from failslow.capture.autoload import autoload; autoload()\n"
        "    times.append(time.thread_time() - start)\n"
        "    from failslow.capture import hook; hook.uninstall()\n"
        "print(min(times))\n"
    )
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"FAILSLOW": "1", "PYTHONPYCACHEPREFIX": str(folder.parent / "pycache")}
    out = subprocess.run(
        [sys.executable, "-c", probe], env=environ, capture_output=True, text=True, check=False,
        timeout=100,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) < 0.020
    assert list(folder.iterdir()) == []


def test_a_broken_failslow_does_not_break_importing_torch(folder: Path) -> None:
    environ = {**os.environ, "FAILSLOW": "1", "FAILSLOW_CAPTURE_MODE": "magic"}
    out = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(2).sum().item())"],
        env=environ, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (out.returncode, out.stdout.strip()) == (0, "2.0")
    assert "this worker is not watched" in out.stderr
