"""Burning cores: how busy they get, who is slowed, and that the burners are gone afterwards."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from tests.inject.conftest import WAIT, Share, Start

from failslow.errors import InjectError
from failslow.inject import burn, parse_cores
from failslow.inject.cgroups import CpuGroup
from failslow.inject.processes import family, is_alive
from failslow.inject.processes import identify as identity


def _burners(guard_pid: int | None) -> list[int]:
    assert guard_pid is not None
    return sorted(family(guard_pid) - {guard_pid})


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_burner_uses_the_share_of_its_core_asked_for(
    load: float,
    heavy_group: CpuGroup,
    start: Start,
    share: Share,
    nothing_left: Callable[[], None],
) -> None:
    # an idle process stands for the worker; beside it the burner weighs enough to get its share
    worker = start(WAIT)

    with burn([0], load=load, beside=worker.pid) as injection:
        (burner,) = _burners(injection.guard_pid)
        assert os.sched_getaffinity(burner) == {0}
        assert burner in heavy_group.members()
        assert share(burner) == pytest.approx(load, abs=0.12)
        process = identity(burner)

    assert not is_alive(process)
    nothing_left()


def test_more_than_a_whole_core_is_several_processes(
    start: Start, nothing_left: Callable[[], None]
) -> None:
    with burn([0], load=1.5, beside=start(WAIT).pid) as injection:
        assert len(_burners(injection.guard_pid)) == 2
    nothing_left()


def test_a_worker_on_the_same_core_gets_half_of_it(
    spinner: subprocess.Popen[bytes], share: Share
) -> None:
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(spinner.pid, {core})
    before = share(spinner.pid)

    with burn([core], beside=spinner.pid):
        during = share(spinner.pid)
    after = share(spinner.pid)

    assert during == pytest.approx(before / 2, rel=0.25)
    assert after > 0.75 * before


def test_one_burner_a_core_and_all_die_when_one_is_killed(
    nothing_left: Callable[[], None],
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]

    with burn(cores, load=0.05) as injection:
        burners = _burners(injection.guard_pid)
        assert sorted(os.sched_getaffinity(b).pop() for b in burners) == cores
        os.kill(burners[0], 9)
        assert injection.wait(20) == "its process was killed"

    assert not any(is_alive(identity(b)) for b in burners if os.path.exists(f"/proc/{b}"))
    nothing_left()


def test_a_burner_dies_with_its_guard_and_the_owner_clears_up(
    nothing_left: Callable[[], None],
) -> None:
    with burn([0], load=0.05) as injection:
        assert injection.guard_pid is not None
        os.kill(injection.guard_pid, 9)
        assert injection.wait(20) == "its guard was killed"
    nothing_left()


def test_a_core_is_burnt_once() -> None:
    with (
        burn([0], load=0.05),
        pytest.raises(InjectError, match="core 0 already has a cpu injection"),
    ):
        burn([0], load=0.05).start()


@pytest.mark.parametrize(
    ("cores", "load", "told"),
    [
        ([], 1.0, "cores is empty"),
        ([4095], 1.0, "core 4095 is not for this process to use; it has 0"),
        ([0, 0], 1.0, "names one twice"),
        ([0], 0.0, r"load \(0\) must be from 0.01 to 1"),
        ([0], 16.5, r"load \(16.5\)"),
    ],
)
def test_values_out_of_range_are_refused(cores: list[int], load: float, told: str) -> None:
    with pytest.raises(InjectError, match=told):
        burn(cores, load=load).start()


def test_cores_are_read_as_the_kernel_lists_them() -> None:
    assert parse_cores("0,2-4, 7") == (0, 2, 3, 4, 7)
    for text in ("", "a", "1-", "0..3"):
        with pytest.raises(InjectError, match="no list of cores; write it as 0,1 or 0-3"):
            parse_cores(text)
