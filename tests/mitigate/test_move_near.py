"""Memory of another process of this machine is read where that is allowed, and only then."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="moving state needs torch")

import torch
from tests.mitigate.test_move import swap_all

from failslow.errors import MoveError
from failslow.mitigate import move, move_near, move_stream
from failslow.mitigate.move_near import Offer, addresses, can_read, collect, readable
from failslow.mitigate.move_stream import digest

HOLDER = """
import ctypes, sys
data = ctypes.create_string_buffer(bytes(range(256)) * 4)
print(ctypes.addressof(data), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process, and where it holds 1024 bytes."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def soon() -> float:
    return time.monotonic() + 30.0


def test_chunks_of_another_process_arrive(holder: tuple[subprocess.Popen[str], int]) -> None:
    process, at = holder
    homes = [torch.zeros(size, dtype=torch.uint8) for size in (256, 200)]
    places = b"".join((at + skip).to_bytes(8, "little") for skip in (256, 519))
    digests = collect(process.pid, places, homes, soon(), digest)
    assert homes[0].tolist() == list(range(256))
    assert homes[1].tolist() == list(range(7, 207))
    assert digests == [digest(home) for home in homes]


def test_a_process_that_is_gone_or_an_address_that_is_none_is_an_error(
    holder: tuple[subprocess.Popen[str], int],
) -> None:
    process, at = holder
    home = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(MoveError, match=r"cannot be read: .*Bad address"):
        collect(process.pid, (8).to_bytes(8, "little"), [home], soon(), digest)
    process.kill()
    process.wait(10)
    with pytest.raises(MoveError, match=rf"process {process.pid} .* cannot be read"):
        collect(process.pid, at.to_bytes(8, "little"), [home], soon(), digest)


def test_it_ends_when_the_time_is_over() -> None:
    data = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(MoveError, match="raise limit_s"):
        collect(1, addresses([data]), [data], time.monotonic() - 1.0, digest)


def test_only_who_holds_the_secret_on_this_machine_and_network_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer = Offer()
    told = offer.told()
    assert can_read(told)
    for wrong in (
        {"secret": "00" * 16},
        {"where": "elsewhere/1"},  # another machine, or a container with a network of its own
        {"where": ""},
        {"pid": 2**22 + 1},
        {"at": 8},
        {"at": None},
    ):
        assert not can_read({**told, **wrong}), wrong
    assert not can_read({})
    monkeypatch.setattr(move_near, "_where", lambda: "")  # a system that does not tell
    assert not can_read(Offer().told())


def test_what_changes_under_the_readers_hands_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's checksum is of its own reading."""
    real = move_near.collect

    def late(pid: int, places: bytes, homes: Any, *rest: Any) -> list[int]:
        numbers = real(pid, places, homes, *rest)
        return [numbers[0], numbers[1] ^ 1, *numbers[2:]]

    monkeypatch.setattr(move, "collect", late)
    mine = [{"w": torch.full((40_000,), float(r))} for r in range(2)]
    _, results = swap_all(mine, [0, 1], [1, 0], near=True)
    assert all("1 of 40 chunks" in str(r) and "number 1" in str(r) for r in results), results


def test_no_chunk_is_sent_where_memory_can_be_read() -> None:
    """A state with gaps, which would have to be copied first, is sent as ever."""
    events = {}
    for every in (1, 2):
        mine = [{"w": torch.full((40_000 * every,), float(r))[::every]} for r in range(2)]
        counted: list[int] = []
        _, results = swap_all(mine, [0, 1], [1, 0], near=True, counted=counted)
        assert [float(r.state["w"][7]) for r in results] == [1.0, 0.0]
        events[every] = max(counted)
    assert events[1] < 10
    assert events[2] > 40


def _mapped_by_a_driver() -> torch.Tensor:
    """Memory that its own process may read and that cannot be read in place: the clock's page."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = [int(line.split("-")[0], 16) for line in maps if line.endswith("[vvar]")]
    if not found:
        pytest.skip("this system maps no page for the clock")
    # its unused end: what is counted at its beginning changes
    page = (ctypes.c_uint8 * 64).from_address(found[0] + 4096 - 64)
    return torch.frombuffer(page, dtype=torch.uint8)


def test_state_that_cannot_be_read_in_place_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was found out in the middle of the move, every time again."""
    monkeypatch.setattr(move_stream, "SMALL", 32)  # what is smaller is copied first
    mapped = _mapped_by_a_driver()
    plain = torch.zeros(3, 5).T[1:]
    assert readable([plain, torch.zeros(0), torch.tensor(1.0)])
    assert not readable([plain, mapped])
    mine = [{"w": torch.full((4,), float(r)), "mapped": mapped} for r in range(2)]
    _, results = swap_all(mine, [0, 1], [1, 0], near=True)
    assert [float(r.state["w"][3]) for r in results] == [1.0, 0.0], results
    assert torch.equal(results[0].state["mapped"], mapped)


def test_more_tensors_than_one_call_reads_are_all_tried() -> None:
    data = torch.zeros(3000)
    assert readable([data[i : i + 1] for i in range(3000)])
    assert not readable([*(data[i : i + 1] for i in range(1500)), _mapped_by_a_driver()])
