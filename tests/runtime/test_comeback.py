"""What is known, before a job is saved and ended, of whether it could start again."""

from __future__ import annotations

import socket

import pytest

from failslow.comeback import against, launched, least_hosts, meets_here, needed_nodes
from failslow.runtime.doctor.settings import known_variables

HOST = socket.gethostname()
TORCHRUN = ("torchrun", "--nnodes", "6:8", "--rdzv-backend", "c10d")


@pytest.mark.parametrize(
    ("command", "environ"),
    [
        (("--rdzv-endpoint", "127.0.0.1:29400", "train.py"), {}),
        (("--rdzv_endpoint=127.0.0.1:29400", "train.py"), {}),
        (("--rdzv-endpoint", "[::1]:29400", "train.py"), {}),
        (("--master-addr", "localhost", "train.py"), {}),
        (("train.py",), {"PET_RDZV_ENDPOINT": "127.0.0.1:29400"}),
    ],
)
def test_the_host_where_all_meet_knows_it(
    command: tuple[str, ...], environ: dict[str, str]
) -> None:
    told = launched([*TORCHRUN, *command], environ)
    assert meets_here(told)
    assert against(told) == ""


@pytest.mark.parametrize(
    "command",
    [
        ("--rdzv-endpoint", "192.0.2.7:29400", "train.py"),  # an address for examples: of nobody
        ("train.py", "--rdzv-endpoint", "127.0.0.1:29400"),  # the script's own
        ("--rdzv-endpoint", ":29400", "train.py"),
        ("--rdzv-endpoint",),
        ("train.py",),
    ],
)
def test_other_hosts_are_not_taken_for_it(command: tuple[str, ...]) -> None:
    told = launched([*TORCHRUN, *command], {})
    assert not meets_here(told)
    assert told["FAILSLOW_LAUNCHER"] == HOST


def test_a_job_that_nobody_would_start_again_as_meant_is_known() -> None:
    assert "start it by failslow run --restarts" in against({})
    elsewhere = against({"FAILSLOW_LAUNCHER": "login-1"})
    assert elsewhere.startswith("only login-1 has a failslow run")
    assert "--slurm requeue" in elsewhere
    requeued = launched(["srun", "python", "train.py"], {}, requeued=True)
    assert against(requeued) == ""
    assert not meets_here(requeued)
    assert least_hosts(requeued) == 0


@pytest.mark.parametrize(
    ("command", "environ", "least"),
    [
        ((*TORCHRUN, "train.py"), {}, 6),
        (("torchrun", "--nnodes=8", "train.py"), {}, 8),
        (("torchrun", "train.py"), {"PET_NNODES": "2:4"}, 2),
        (("torchrun", "--nproc-per-node", "4", "train.py"), {}, 1),
        (("torchrun", "--nnodes", "$N", "train.py"), {}, 1),
    ],
)
def test_the_fewest_hosts_a_launcher_starts_on_are_known(
    command: tuple[str, ...], environ: dict[str, str], least: int
) -> None:
    told = launched(command, environ)
    assert least_hosts(told) == least
    assert told.keys() <= known_variables()  # doctor calls no other one its own


@pytest.mark.parametrize(
    ("nnodes", "needed"), [("8", 8), ("8:8", 8), ("6:8", 0), ("1", 0), ("1:1", 0), ("$N", 0)]
)
def test_a_launcher_that_cannot_do_with_fewer_nodes_is_known(nnodes: str, needed: int) -> None:
    assert needed_nodes(["torchrun", f"--nnodes={nnodes}", "train.py"]) == needed
    assert needed_nodes(["torchrun", "train.py", "--nnodes", nnodes]) == 0
