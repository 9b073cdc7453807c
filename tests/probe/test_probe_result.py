"""The record of a probe, its spec, and the command that runs it."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from typing import Any

import pytest
import typer

from failslow.cli import app
from failslow.probe import ProbeResult, ProbeSpec, command, result

FULL = ProbeResult(
    probe_id="c1-0007",
    campaign="c1",
    nodes=("node0", "node1"),
    devices=("cpu AMD EPYC",),
    workers=4,
    pp=2,
    dp=2,
    begin_t=1745735241.0,
    end_t=1745735301.5,
    state="done",
    iterations=390,
    healthy_iteration_s=0.121,
    reference_iteration_s=0.121,
    reference_source="own start",
    result="communication",
    cause="network congestion",
    onset_delay_s=14.25,
    slow_s=31.0,
    slowdown=1.62,
    lost_s=11.9,
    jct_increase_share=0.24,
    culprits=("link node1>node0",),
    culprit_causes=("network congestion",),
    culprit_nodes=("node0", "node1"),
    evidence=("For network congestion: «…»",),
    latency_cv_inter_node=0.31,
)


def test_examples() -> None:
    assert doctest.testmod(result).failed == 0


def test_a_result_survives_its_line() -> None:
    line = FULL.to_json()
    assert "\n" not in line
    assert ProbeResult.from_json(line) == ProbeResult.from_json(line.encode()) == FULL
    assert json.loads(line)["size_class"] == "multi-node"
    assert replace(FULL, nodes=("n",)).size_class == "single-node"
    assert FULL.duration_s == 60.5
    assert FULL.is_slow


def test_keys_that_are_not_known_are_left_aside() -> None:
    found = json.loads(FULL.to_json()) | {"of_the_future": 1}
    assert ProbeResult.from_json(json.dumps(found)) == FULL


def test_a_result_without_its_devices_is_read_as_of_unknown_ones() -> None:
    found = json.loads(FULL.to_json())
    del found["devices"]
    assert ProbeResult.from_json(json.dumps(found)) == replace(FULL, devices=())


def test_what_somebody_may_look_into_is_worth_keeping() -> None:
    """Slower than the fleet is a question, too, whatever it was called."""
    assert FULL.worth_keeping
    healthy = replace(FULL, result="healthy", onset_delay_s=None, evidence=())
    assert replace(healthy, evidence=("Not counted: 7 s at ×1.12",)).worth_keeping
    assert not healthy.worth_keeping
    assert not replace(healthy, fleet_iteration_s=0.12).worth_keeping
    assert replace(healthy, fleet_iteration_s=0.109).worth_keeping
    assert not replace(healthy, fleet_iteration_s=0.1, healthy_iteration_s=None).worth_keeping


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"slowdown": "fast"}, "slowdown: Input should be a valid number"),
        ({"slowdown": -1}, "slowdown: Input should be greater than or equal to 0"),
        ({"nodes": []}, "nodes: Tuple should have at least 1 item"),
        ({"nodes": ["a", 3]}, "nodes.1: Input should be a valid string"),
        ({"state": "asleep"}, "state: Input should be 'done', 'preempted' or 'failed'"),
        ({"iterations": 1.5}, "iterations: Input should be a valid integer"),
        ({"end_t": 5.0}, "end_t (5.0) is before begin_t (1745735241.0)"),
        ({"dp": 3}, "tp 1 × pp 2 × dp 3 is not workers (4)"),
        ({"culprit_causes": []}, "culprit_causes has 0 entries for 1 culprits"),
        ({"schema": "other/1"}, "no record of schema failslow.probe/1"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(change: dict[str, Any], told: str) -> None:
    text = json.dumps(json.loads(FULL.to_json()) | change)
    with pytest.raises(ValueError, match=r"\Ahere: ") as caught:
        ProbeResult.from_json(text, where="here")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, b"\xff\xfe{}", '{"a": NaN}']
)
def test_what_is_no_record_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="probe result"):
        ProbeResult.from_json(text)


def test_a_key_that_is_missing_is_named() -> None:
    found = json.loads(FULL.to_json())
    del found["probe_id"]
    with pytest.raises(ValueError, match="probe_id: Field required"):
        ProbeResult.from_json(json.dumps(found))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"probe_id": "a/b"}, "probe_id"),
        ({"probe_id": ""}, "probe_id"),
        ({"nodes": 0}, r"nodes \(0\)"),
        ({"duration_s": 0.0}, r"duration_s \(0.0\)"),
        ({"iterations": 0}, r"iterations \(0\)"),
    ],
)
def test_a_spec_out_of_range_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ProbeSpec(**({"probe_id": "p"} | wrong))


def test_every_option_of_the_command_is_known_to_it() -> None:
    spec = ProbeSpec(
        probe_id="p-1", campaign="c", nodes=3, workers_per_node=2, iterations=9, preset="gpu"
    )
    argv = command(
        spec,
        out="r.json",
        folder="f",
        history=["a.jsonl", "b.jsonl"],
        node_rank=1,
        rendezvous="h:1",
        python="py",
    )
    assert argv[:5] == ("py", "-m", "failslow", "probe", "run")
    group = typer.main.get_command(app)
    run: Any = group.commands["probe"].commands["run"]  # type: ignore[attr-defined]  # a group
    context = run.make_context("run", list(argv[5:]))
    given = context.params
    assert (given["nodes"], given["workers"], given["iterations"]) == (3, 2, 9)
    assert (given["probe_id"], given["campaign"], given["preset"]) == ("p-1", "c", "gpu")
    assert (given["node_rank"], given["rendezvous"]) == (1, "h:1")
    assert [str(path) for path in given["history"]] == ["a.jsonl", "b.jsonl"]
    assert (str(given["out"]), str(given["folder"]), given["quiet"]) == ("r.json", "f", True)
    assert given["duration"] == spec.duration_s
