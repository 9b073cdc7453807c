"""Where agents and controller meet, who may read what lies there, and what travels between them."""

from __future__ import annotations

import os
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.capture.origin import process_identity
from failslow.errors import ConfigError
from failslow.pipeline import AgentBeat, Report, WorkerSamples, WorkerState
from failslow.records import StepSample
from failslow.runtime.claim import Claim, dump_claims, pid_namespace
from failslow.runtime.doctor.machine import stale_rings
from failslow.runtime.folder import RunFolder, remove_stale_folders, stale_folders
from failslow.runtime.rendezvous import derived_port, is_single_node, meeting, node_name
from failslow.runtime.wire import bundle, decode, encode_beat, encode_report, encode_samples

TORCHRUN = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}
CLUSTER = {
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "single"),
    [
        (TORCHRUN, True),
        (CLUSTER, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "gpu-17"}, False),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "gpu-17"}, True),
        ({}, True),
    ],
)
def test_one_node_is_told_from_several(environ: dict[str, str], single: bool) -> None:
    assert is_single_node(environ) is single


def test_a_single_node_meets_on_loopback() -> None:
    meet = meeting("job", TORCHRUN)
    assert (meet.url, meet.serve, meet.alone) == (None, "tcpstore://127.0.0.1:0", False)


def test_several_nodes_meet_at_master_addr_on_a_port_all_of_them_know() -> None:
    environ = {**CLUSTER, "FAILSLOW_TOKEN": "0" * 32}
    meet = meeting("job", environ)
    port = derived_port("job", environ)
    assert meet.url == meet.serve == f"tcpstore://10.0.0.1:{port}"
    assert 10_000 <= port < 32_000
    assert derived_port("job", environ | {"RANK": "9"}) == port
    assert derived_port("job2", environ) != port


def test_several_nodes_without_a_token_stay_on_loopback() -> None:
    meet = meeting("job", CLUSTER)
    assert (meet.url, meet.serve, meet.alone) == (None, "tcpstore://127.0.0.1:0", True)


def test_a_given_transport_is_used_and_served_only_if_it_is_a_tcpstore() -> None:
    store = meeting("job", {**CLUSTER, "FAILSLOW_TRANSPORT": "tcpstore://10.0.0.9:7777"})
    assert store.url == store.serve == "tcpstore://10.0.0.9:7777"
    redis = meeting("job", {"FAILSLOW_TRANSPORT": "redis://10.0.0.9"})
    assert (redis.url, redis.serve) == ("redis://10.0.0.9", None)
    with pytest.raises(ConfigError, match="stays inside one process"):
        meeting("job", {"FAILSLOW_TRANSPORT": "memory://x"})


def test_hosts_that_nobody_named_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "localhost.localdomain")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    assert node_name(CLUSTER).startswith(f"localhost.localdomain-{boot}")
    assert boot not in node_name(TORCHRUN)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-17")
    assert node_name(CLUSTER).startswith("gpu-17")
    assert boot not in node_name(CLUSTER)


def test_a_node_has_the_name_it_is_given() -> None:
    assert node_name({"FAILSLOW_NODE": "gpu-17"}) == "gpu-17"
    assert node_name({})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder("job", {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)})


def test_what_lies_in_the_run_folder_is_this_users_alone(folder: RunFolder) -> None:
    folder.write("address", "tcpstore://127.0.0.1:7777")
    token = folder.token()
    assert folder.token() == token
    assert len(token) >= 32
    assert folder.read("address") == "tcpstore://127.0.0.1:7777"
    assert folder.read("nothing") is None
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.path.iterdir()} == {0o600}


def test_a_run_folder_others_can_enter_is_refused(tmp_path: Path) -> None:
    environ = {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)}
    path = RunFolder("job", environ).path
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="not this user's alone; remove it"):
        RunFolder("job", environ)
    shutil.rmtree(path)
    path.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not this user's alone"):
        RunFolder("job", environ)


def test_a_folder_whose_users_were_killed_is_found_and_removed(
    folder: RunFolder, tmp_path: Path
) -> None:
    environ = {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)}
    lock = folder.lock("agent-n1")
    assert lock is not None
    mine = Claim(
        job="job", origin="1-2", worker=f"{os.getpid()}-1", node="n1", several=False,
        journal="/runs/job", namespace=pid_namespace(),
    )  # fmt: skip
    folder.write("claims", dump_claims([mine]))

    def stale() -> list[Path]:
        os.utime(folder.path, (1.0, 1.0))  # else it counts as one that comes up
        return [found.path for found in stale_folders(environ, time.time())]

    assert stale() == [], "somebody holds a lock"
    os.close(lock)
    assert stale() == [folder.path]
    assert stale_folders(environ, 600.0) == [], "just made"
    folder.write("claims", dump_claims([replace(mine, worker=process_identity(os.getpid()))]))
    assert stale() == [], "its worker lives"
    folder.write("claims", dump_claims([replace(mine, namespace="pid:[1]")]))
    assert stale() == [], "of another container"
    folder.write("claims", dump_claims([mine]))
    assert stale() == [folder.path]
    assert stale_rings(environ).found == f"1 run folder of killed jobs: {folder.path}"
    remove_stale_folders(environ)
    assert not folder.path.exists()


def test_a_lock_is_held_once_and_freed_by_its_last_holder(folder: RunFolder) -> None:
    held = folder.lock("agent-a")
    assert held is not None
    assert folder.lock("agent-a") is None
    other = folder.lock("agent-b")
    assert other is not None
    copy = os.dup(held)  # as a child has it
    os.close(held)
    assert folder.lock("agent-a") is None
    os.close(copy)
    again = folder.lock("agent-a")
    assert again is not None
    os.close(again)
    os.close(other)


def test_the_folder_goes_when_nobody_holds_it_and_not_before(folder: RunFolder) -> None:
    held = folder.lock("controller")
    assert held is not None
    folder.token()
    assert not folder.tidy()
    assert folder.path.exists()
    os.close(held)
    assert folder.tidy()
    assert not folder.path.exists()
    late = folder.lock("controller")
    assert late is not None
    os.close(late)


finite = st.floats(allow_nan=False, allow_infinity=False)
samples = st.builds(
    StepSample,
    step=st.integers(-1, 2**53),
    duration_s=st.floats(1e-6, 1e6),
    end_s=finite,
    iterations=st.integers(1, 100),
    work=st.none() | finite,
    compute_s=st.none() | finite,
    calls=st.none() | st.integers(0, 10**6),
    foreign_calls=st.integers(0, 100),
    run=st.integers(0, 9),
)


@given(rows=st.lists(samples, min_size=1, max_size=20), counted=st.booleans())
def test_samples_arrive_as_they_were_sent(rows: list[StepSample], counted: bool) -> None:
    event = WorkerSamples(
        node="n", rank=3, worker="1-2", session=4, counted=counted, samples=tuple(rows)
    )
    (payload,) = encode_samples(event)
    assert decode(payload) == [event]


def test_many_samples_are_sent_in_messages_the_transport_takes() -> None:
    row = StepSample(
        step=2**53,
        duration_s=0.123456789012345,
        end_s=1745735250.123456,
        work=1.23456789e12,
        compute_s=0.123456789012345,
        calls=100_000,
    )
    event = WorkerSamples(node="n", rank=3, worker="1-2", session=4, counted=True, samples=(row,))
    many = WorkerSamples(
        node="n", rank=3, worker="1-2", session=4, counted=True, samples=(row,) * 2500
    )
    payloads = list(encode_samples(many))
    decoded = [event for payload in payloads for event in decode(payload)]
    assert sum(len(d.samples) for d in decoded if isinstance(d, WorkerSamples)) == 2500
    assert max(map(len, payloads)) < 250_000
    assert decode(next(encode_samples(event))) == [event]


def test_beats_arrive_as_they_were_sent() -> None:
    state = WorkerState(rank=3, worker="1-2", world_size=8, alive=True, lost_records=4, note="ü")
    beat = AgentBeat(node="n", session=2**48 - 1, workers=(state,), leaving=True)
    assert decode(encode_beat(beat)) == [beat]


@given(sizes=st.lists(st.integers(0, 60_000), max_size=12))
def test_what_is_said_in_a_turn_goes_together_in_its_order(sizes: list[int]) -> None:
    reports = [
        Report(node="n", rank=rank, topic="profile", body={"x": "y" * size})
        for rank, size in enumerate(sizes)
    ]
    messages = list(bundle(map(encode_report, reports)))
    assert [event for message in messages for event in decode(message)] == reports
    assert max(map(len, messages), default=0) < 200_000
    assert len(messages) <= 1 + sum(sizes) // 60_000


def test_what_is_damaged_in_a_message_costs_no_more_than_itself() -> None:
    beat = AgentBeat(node="n", session=1, workers=())
    assert decode(b'[{"beat":7},%b,null,{}]' % encode_beat(beat)) == [beat]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"beat":{}}',
        b'{"beat":{"node":"n","session":1,"workers":[{"rank":1}]}}',
        b'{"samples":{"node":"n","session":1,"rank":0,"worker":"w","counted":true,"rows":[[1]]}}',
        b'{"samples":{"node":"n","session":1,"rank":0,"worker":"w","counted":true,'
        b'"rows":[[1,0,1,1,null,null,null,0,0]]}}',
        b"\xff",
    ],
)
def test_what_is_no_message_is_passed_over(payload: bytes) -> None:
    assert decode(payload) == []
