"""What an inquiry makes of where the workers are, and of links that a pause found well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest
from tests.runtime.test_inquiry import HEALTHY_S, RANKS, Inquired

from failslow.config import DecideConfig, LocalizeConfig
from failslow.localize import script
from failslow.localize.script import WorkerPlace

J = TypeVar("J", bound=Inquired)


class Gpus(Inquired):
    """The workers have GPUs, as they say themselves (stand-ins): each its own."""

    devices = len(RANKS)

    def begin(self, launch: str, entries: Any = ()) -> None:
        self.scripts: list[script.Script] = []
        super().begin(launch, entries)

    def tell(self, rank: int | None, topic: str, body: dict[str, Any]) -> None:
        if topic == "profile":
            body |= {"device": "NVIDIA H200", "device_id": f"GPU-{(rank or 0) % self.devices}"}
        super().tell(rank, topic, body)

    def do_pause(self, body: Any) -> None:
        if body["do"] == "arm":
            self.scripts.append(body["script"])
        super().do_pause(body)

    def places(self) -> list[WorkerPlace]:
        return [replace(place, device="NVIDIA H200") for place in super().places()]


class Shared(Gpus):
    """All one."""

    devices = 1


def job(made: type[J]) -> J:
    return made(
        decide=DecideConfig(mode="advise"),
        localize=LocalizeConfig(pauses_per_hour=100, max_pause_share=1.0),
    )


@pytest.mark.parametrize(("made", "waves"), [(Gpus, 1), (Shared, 4)])
def test_ranks_with_devices_of_their_own_measure_at_the_same_time(
    made: type[Gpus], waves: int
) -> None:
    gpus = job(made)
    gpus.story()
    assert len(gpus.scripts) == 2  # the reference's, the suspects'
    for found in gpus.scripts:
        computing = [stage["ranks"] for stage in found if stage["do"] == "gemm"]
        assert len(computing) == waves
        assert sorted(rank for wave in computing for rank in wave) == list(RANKS)
    assert [f.ranks for f in gpus.said("verdict")[-1].record.findings] == [(2,)]


def test_the_next_pause_knows_what_an_empty_one_found_well(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[set[str]] = []
    plan = script.plan

    def planned(*args: Any, well: Any, **more: Any) -> script.Script:
        known.append(set(well))
        return plan(*args, well=well, **more)

    monkeypatch.setattr(script, "plan", planned)
    cpus = job(Inquired)
    cpus.shy = 1
    cpus.story()
    cpus.iterate(200, HEALTHY_S, slow=1.4, culprit=2)
    assert known[0] == set()
    assert {"link node0>node1", "link node1>node0"} <= known[1]
