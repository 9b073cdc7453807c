"""Fixtures and helpers for tests of the hook inside their own process. Needs torch.

A test module names this one in `pytest_plugins`, after it made sure that torch is there, and
imports helpers from it; so pytest finds it imported (PYTEST_DONT_REWRITE).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from failslow.capture import hook
from failslow.capture.builder import extension_path
from failslow.capture.layout import CALL
from failslow.capture.reader import RingReader


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where rings go; whatever the test installed is gone after it."""
    monkeypatch.setenv("FAILSLOW_CAPTURE_FOLDER", str(tmp_path))
    monkeypatch.setenv("FAILSLOW_JOB", "unit")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    yield tmp_path
    hook.uninstall()


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


@pytest.fixture(params=["native", "dispatcher"])
def mode(request: pytest.FixtureRequest) -> str:
    """Both ways of capture, as far as this machine has the extension built."""
    if request.param == "native" and not extension_path().exists():
        pytest.skip("the extension is not built: python -m failslow.capture.native")
    return str(request.param)


@pytest.fixture
def watched(folder: Path, mode: str) -> Callable[[], RingReader]:
    """The hook, installed; the value opens the ring, once there is one."""
    hook.install(mode)
    return lambda: RingReader(next(folder.glob("*.ring")))


@contextmanager
def replaced(key: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """Within it `kernel` is what all_reduce does on devices of dispatch key `key`."""
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there was a kernel before: it is meant
        library.impl("allreduce_", kernel, key)
    yield
    library._destroy()


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
