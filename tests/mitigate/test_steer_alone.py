"""The watched job's side of steering in one process, a gloo job of one worker."""

from __future__ import annotations

import gc
import json
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import failslow
from failslow.capture import hook
from failslow.comeback import launched, saved
from failslow.errors import PlanError
from failslow.mailbox import Mailbox
from failslow.mitigate import coordinator as coordinator_module
from failslow.mitigate import steer, steer_group, steer_refuse
from failslow.mitigate.batches import Split
from failslow.mitigate.move_fake import ThreadHub, ThreadWire
from failslow.mitigate.move_stream import stream_bytes
from failslow.mitigate.rebuild import LiveGrid
from failslow.mitigate.steer_letters import facts_letter

_ROOM = 512 * 1024
"""Of letters to the agent."""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    monkeypatch.setattr(coordinator_module, "_watched", lambda: True)
    yield
    dist.destroy_process_group()


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mailbox:
    """The worker's end."""
    made = Mailbox.create(tmp_path / "r0.ring")
    monkeypatch.setattr(hook, "mailbox", lambda: made)
    return made


def _step(coordinator: failslow.Coordinator, first: int, count: int) -> None:
    for index in range(first, first + count):
        with coordinator.step(index) as share:
            assert list(share) == list(range(8))


def _facts(agent: Mailbox) -> list[dict[str, Any]]:
    return [letter for letter in agent.receive() if letter.get("what") == "facts"]


def _fill(box: Mailbox, left: int) -> None:
    """Until so many bytes are left."""
    full = _ROOM - left
    for size in (*[100_000] * (full // 100_000), full % 100_000):
        letter = {"topic": "pace", "pad": ""}
        pad = size - 8 - len(json.dumps(letter, separators=(",", ":")))
        assert box.send({**letter, "pad": "." * pad})


def test_facts_that_find_no_room_are_sent_later_and_whole(
    watched: None, box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other facts would be another training's, and its policy would begin anew."""
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 1400)
    coordinator = failslow.Coordinator(8, listen_s=0.0)
    agent = Mailbox.open(box.path)
    _fill(box, left=1000)  # too little for the facts, enough for those without hosts
    _step(coordinator, 0, 3)
    assert _facts(agent) == []
    _step(coordinator, 3, 1)
    (facts,) = _facts(agent)
    assert facts["hosts"] == ["h" * 1400]


def test_facts_too_long_for_a_letter_never_have_hosts(
    watched: None, box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 1400)
    monkeypatch.setattr(steer, "MAX_LETTER", 1500)
    coordinator = failslow.Coordinator(8, listen_s=0.0)
    agent = Mailbox.open(box.path)
    _step(coordinator, 0, 30)  # the healthy iteration time is learned meanwhile
    told = _facts(agent)
    assert [facts["hosts"] for facts in told] == [[], []]
    assert told[-1]["iteration_s"] > 0.0


def test_facts_that_are_too_long_even_so_leave_out_who_is_at_his_own_place(
    watched: None, box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = failslow.Coordinator(8, listen_s=0.0).facts
    assert known is not None
    text = json.dumps({**facts_letter(known), "hosts": ()}, separators=(",", ":"))
    monkeypatch.setattr(steer, "MAX_LETTER", len(text) - 1 + steer._FACTS_GROW)
    coordinator = failslow.Coordinator(8, listen_s=0.0)
    agent = Mailbox.open(box.path)
    _step(coordinator, 0, 1)
    (facts,) = _facts(agent)
    assert (facts["hosts"], facts["ranks"], facts["dp"]) == ([], [], 1)


def _no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")


def _no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the group with the others cannot be made."""
    _no_interface(monkeypatch)
    monkeypatch.setattr(coordinator_module, "_check_gloo", lambda: None)


def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of which nothing can be learned."""

    def why_equal(*_: object, **__: object) -> str:
        raise AttributeError("no such thing")

    monkeypatch.setattr(steer_refuse, "why_equal", why_equal)


def _few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where two thousand workers want connections to each other, and 1024 files may be open."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (40, 4096))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_no_interface, "nosuch0"),
        (_no_group, "nosuch0"),
        (_no_model, "no such thing"),
        (_few_files, "and 40 are allowed; raise ulimit -n"),
    ],
)
def test_without_a_group_of_its_own_training_goes_on_evenly(
    watched: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[pytest.MonkeyPatch], None],
    why: str,
) -> None:
    spoil(monkeypatch)
    groups = len(dist.distributed_c10d._world.pg_map)
    coordinator = failslow.Coordinator(8, listen_s=0.0, model=torch.nn.Linear(2, 2))
    _step(coordinator, 0, 3)
    assert coordinator.facts is None
    assert coordinator.counts == (8,)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    said = capsys.readouterr().err
    assert said.count("failslow: ") == said.count("rank 0 takes no orders") == 1
    assert why in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("interface", "addresses", "alone"),
    [
        ("", ["127.0.1.1", "10.0.0.7"], True),  # a Debian's /etc/hosts
        ("", ["10.0.0.7"], False),
        ("", [], True),  # a name that is none
        ("", ["fe80::1%eth0"], False),
        ("lo", ["10.0.0.7"], True),
        ("nosuch0", ["10.0.0.7"], True),
    ],
)
def test_a_gloo_that_no_other_host_could_reach_is_known(
    interface: str, addresses: list[str], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: found)
    assert ("set GLOO_SOCKET_IFNAME" in steer_group.why_alone()) == alone


def test_hosts_that_cannot_reach_each_other_by_gloo_do_not_wait_for_it(
    watched: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be half an hour, several times over."""

    def all_reduce(least: torch.Tensor, _op: object) -> None:
        least[2] -= 1.0  # another host's name

    monkeypatch.setattr(coordinator_module, "why_alone", lambda: "gloo listens at 127.0.1.1 alone")
    assert failslow.Coordinator(8).facts is not None  # on one host that does
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    assert failslow.Coordinator(8).facts is None
    assert "gloo listens at 127.0.1.1 alone" in capsys.readouterr().err


def test_the_model_in_use_is_the_one_that_is_asked_and_is_not_kept(
    watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def why_equal(*_: object, model: object = None, **__: object) -> str:
        asked.append(None if model is None else type(model))
        return ""

    monkeypatch.setattr(steer_refuse, "why_equal", why_equal)
    first, second = torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2)
    coordinator = failslow.Coordinator(8, model=first)
    coordinator._hands.why_equal([0])
    coordinator.use(second)
    coordinator._hands.why_equal([0])
    gone = weakref.ref(first)
    del first
    assert gone() is None
    coordinator.use(None)
    coordinator._hands.why_equal([0])
    assert asked == [torch.nn.Linear, torch.nn.Linear, torch.nn.SyncBatchNorm, None]


def test_the_first_iteration_is_bounded_before_it_makes_any_call(
    watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, int]] = []
    monkeypatch.setattr(hook, "begin_steps", lambda index: said.append(("begin", index)))
    monkeypatch.setattr(hook, "mark_step", lambda index, _work: said.append(("end", index)))
    _step(failslow.Coordinator(8), 5, 2)
    assert said == [("begin", 5), ("end", 5), ("begin", 6), ("end", 6)]


def test_unequal_counts_are_refused_where_the_model_was_replaced_and_nobody_said_so(
    watched: None,
) -> None:
    """The new one exchanges gradients in every micro-batch: the workers would wait for ever."""
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    coordinator = failslow.Coordinator(4, model=model)
    coordinator._may_differ = True  # they do
    hands = coordinator._hands
    assert hands.why_equal([0]) == ""
    del model
    gc.collect()
    assert "call coordinator.use(model)" in hands.why_equal([0])
    hands.split = Split(counts=(3, 1))  # of two replicas, as this worker sees it
    with pytest.raises(PlanError, match=r"\[3, 1\] .* for ever .* coordinator.use\(model\)"):
        coordinator.begin(0)
    coordinator.use(DistributedDataParallel(torch.nn.Linear(2, 2)))
    assert "call coordinator.use(model)" in hands.why_equal([0])  # it was not kept either
    coordinator.use(None)
    assert hands.why_equal([0]) == ""


def test_the_trainings_default_device_is_none_of_ours(watched: None, box: Mailbox) -> None:
    """Of set_default_device("cuda"): gloo and bytes that come want the host's memory."""
    agent = Mailbox.open(box.path)
    with torch.device("meta"):
        coordinator = failslow.Coordinator(8, listen_s=0.0, checkpoint=lambda _: None)
        plan = {"level": "S1", "predicted_slowdown": 1.0, "microbatches": [8]}
        assert agent.send({"topic": "steer", "id": 5, "level": "S1", "plan": plan})
        _step(coordinator, 0, 3)
        assert LiveGrid.build((0,), sizes=(1, 1, 1), device_type="cpu").stage == 0
        wire = ThreadWire(ThreadHub(1), 0)
        assert stream_bytes(wire, b"mine", 4, (0, 0), time.monotonic() + 9.0) == b"mine"
    assert [x["ok"] for x in agent.receive() if x.get("what") == "outcome"] == [True]


def test_a_job_that_saved_itself_says_so_to_the_launcher_that_starts_it_again(
    watched: None, box: Mailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILSLOW_DIR", str(tmp_path))
    for name, value in launched(["train"], {}).items():
        monkeypatch.setenv(name, value)
    agent = Mailbox.open(box.path)
    coordinator = failslow.Coordinator(8, listen_s=0.0, checkpoint=lambda _: None)
    _step(coordinator, 0, 2)
    assert saved(tmp_path) == {}
    plan = {"level": "S4", "predicted_slowdown": 1.0}
    assert agent.send({"topic": "steer", "id": 5, "level": "S4", "plan": plan})
    _step(coordinator, 2, 5)
    assert coordinator.stop
    assert len(saved(tmp_path)) == 1


class _Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("no such field")


def test_an_error_that_cannot_be_told_costs_the_order_and_no_step(
    watched: None, box: Mailbox
) -> None:
    def checkpoint(_: int) -> None:
        raise _Mute

    agent = Mailbox.open(box.path)
    coordinator = failslow.Coordinator(8, listen_s=0.0, checkpoint=checkpoint)
    coordinator._hands.no_comeback = ""
    plan = {"level": "S4", "predicted_slowdown": 1.0}
    assert agent.send({"topic": "steer", "id": 5, "level": "S4", "plan": plan})
    _step(coordinator, 0, 3)
    (answer,) = (x for x in agent.receive() if x.get("what") == "outcome")
    assert (answer["ok"], answer["error"]) == (False, "rank 0: _Mute")


def test_coordinators_that_are_gone_leave_no_group_behind(watched: None) -> None:
    """A process may train many times; each had kept connections to all others, and threads."""
    groups = dist.distributed_c10d._world.pg_map
    coordinator = failslow.Coordinator(8)
    known = len(groups)
    for _ in range(3):
        coordinator = failslow.Coordinator(8)  # the one before is in use till then
        _step(coordinator, 0, 2)
        assert len(groups) <= known + 1
    other = failslow.Coordinator(8)
    _step(coordinator, 0, 2)
    assert None not in [x._steering and x._steering._group for x in (coordinator, other)]


def test_what_does_not_fit_the_job_is_raised_all_the_same(
    watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why_equal(*_: object, **__: object) -> str:
        raise PlanError("no such grid")

    monkeypatch.setattr(steer_refuse, "why_equal", why_equal)
    with pytest.raises(PlanError, match="no such grid"):
        failslow.Coordinator(8)


def test_unequal_counts_are_refused_to_a_loop_that_exchanges_in_every_micro_batch(
    watched: None,
) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    coordinator = failslow.Coordinator(4, model=model)
    told = []
    for first in (True, False):
        with coordinator.step(0) as share:
            for _ in list(share) if first else share:
                model(torch.ones(1, 2)).sum().backward()
        told.append(coordinator._hands.why_equal([0]))
    assert told[0].startswith("gradients are exchanged in every micro-batch")
    assert told[1] == ""


def test_whether_the_job_could_start_again_is_told(
    watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def facts() -> Any:
        return failslow.Coordinator(8, checkpoint=lambda _: None).facts

    monkeypatch.delenv("FAILSLOW_LAUNCHER", raising=False)
    assert "start it by failslow run --restarts" in facts().no_restart
    command = ["torchrun", "--nnodes", "2:3", "--master-addr", "localhost"]
    for name, value in launched(command, {}).items():
        monkeypatch.setenv(name, value)
    assert (facts().no_restart, facts().meeting, facts().least_hosts) == ("", (0,), 2)
    monkeypatch.setenv("FAILSLOW_MEETS", "")
    assert facts().meeting == ()


@pytest.mark.parametrize("bound", [torch.device("cuda", 3), None])
def test_tensors_are_where_the_group_s_device_is(
    bound: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `device_id` given nobody needs to set the current one. NOT RUN on GPUs."""
    group: Any = SimpleNamespace(bound_device_id=bound)
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert coordinator_module._device(group) == (bound or torch.device("cuda", 0))


def test_a_larger_step_than_the_replicas_can_run_is_refused(watched: None) -> None:
    coordinator = failslow.Coordinator(8, most=10)
    assert coordinator.begin(0, 10).count == 10
    coordinator.end()
    with pytest.raises(PlanError, match="at most 10 each"):
        coordinator.begin(1, 11)
