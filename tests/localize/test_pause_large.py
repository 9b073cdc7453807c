"""The reference of a thousand ranks, through the pause's real parts: messages, letters, verdict."""

from __future__ import annotations

import json

import pytest
from tests.localize.made_results import Lab

from failslow.config import LocalizeConfig
from failslow.localize.judge import judge
from failslow.localize.pause import TOPIC, PauseLead
from failslow.localize.pause_node import GroupCount, PauseNode, Post, WorkerView
from failslow.localize.script import Script, ScriptSettings, WorkerPlace, reference_script
from failslow.localize.script_wire import members
from failslow.mailbox import MAX_LETTER
from failslow.pipeline import Order, Report
from failslow.runtime.transport.endpoint import MAX_PAYLOAD_BYTES
from failslow.runtime.wire import decode_order, encode_order, encode_report

KEY = "0 default_pg nccl"
NODES, EACH = 128, 8
RANKS = range(NODES * EACH)


def on_the_bus(body: dict[str, object]) -> dict[str, object]:
    """What agents get of an order to all."""
    message = encode_order(Order(topic=TOPIC, body=body))
    assert len(message) < MAX_PAYLOAD_BYTES // 16
    order = decode_order(message)
    assert order is not None
    return dict(order.body)


def part_of(arm: dict[str, object], node: int) -> Script:
    """The script that the workers of a node are sent."""
    agent, count = PauseNode(), GroupCount(0, KEY, 100)
    views = [
        WorkerView(rank=rank, alive=True, speaks=True, counts=(count,))
        for rank in range(node * EACH, (node + 1) * EACH)
    ]
    agent.turn(views, 1.0)
    agent.order(arm, 1.0)
    posted = {a.rank: a.letter for a in agent.turn(views, 1.0) if isinstance(a, Post)}
    assert posted.keys() == {view.rank for view in views}
    part: Script = posted[node * EACH]["script"]
    assert all(letter["script"] == part for letter in posted.values())
    assert len(json.dumps(posted[node * EACH])) < MAX_LETTER // 16
    return part


@pytest.mark.parametrize("device", ["NVIDIA H200", "cpu"])
def test_the_reference_of_a_thousand_ranks_reaches_and_covers_them_all(device: str) -> None:
    workers = [
        WorkerPlace(
            rank=rank,
            node=f"n{rank // EACH}",
            host=f"boot-{rank // EACH}",
            device=device,
            device_id="" if device == "cpu" else f"GPU-{rank % EACH}",
        )
        for rank in RANKS
    ]
    config = LocalizeConfig()
    script = reference_script(workers, ScriptSettings.from_config(config))
    lead = PauseLead(config, mode="advise")
    (survey,) = lead.begin(script, RANKS, 1000.0, reference=True)
    about = {"id": survey["id"], "say": "groups", "groups": [[KEY, 100, 2, 0.1]], "speaks": True}
    out = [body for rank in RANKS for body in lead.report(rank, about, 1000.1)]
    (arm,) = map(on_the_bus, out)
    whole = [set(members(stage)) for stage in script]
    told = [[set(members(stage)) for stage in part_of(arm, node)] for node in range(NODES)]
    for node, stages in enumerate(told):
        mates = set(range(node * EACH, (node + 1) * EACH))
        for index, (stage, part) in enumerate(zip(script, stages, strict=True)):
            # all that they are to do, and nobody to wait for who is not told to do it, too
            assert mates & part == mates & whole[index]
            assert len(part) <= EACH
            others = part - mates if stage.get("wait", True) else set()
            assert all(rank in told[rank // EACH][index] for rank in others)
    results = Lab(workers=workers, noise=0.03).run(script)
    own: dict[int, list[dict[str, object]]] = {rank: [] for rank in RANKS}
    for result in results:
        own[result["by"] if "by" in result else result["rank"]].append(result)
    for rank in RANKS:
        lead.report(rank, {"id": survey["id"], "say": "ready"}, 1000.5)
    for rank in RANKS:
        done = {"say": "done", "id": survey["id"], "results": own[rank], "error": "", "step": 7,
                "pause_s": 2.4, "waited_s": 0.1}  # fmt: skip
        report = Report(node=f"n{rank // EACH}", rank=rank, topic=TOPIC, body=done)
        assert len(encode_report(report)) < MAX_PAYLOAD_BYTES // 16
        lead.report(rank, done, 1003.0)
    assert lead.result is not None
    assert lead.result.ok
    assert lead.result.results.keys() == set(RANKS)
    flat = [result for of in lead.result.results.values() for result in of]
    verdict = judge(flat, (), workers, episode="")
    assert verdict.findings == ()
    assert "1024 devices" in verdict.note
    assert f"{2 * NODES} links" in verdict.note
