"""The Megatron adapter: on megatron-core if that is installed, else on labelled stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from job_launch import launch

from failslow.errors import PlanError
from failslow.integrations.megatron import Megatron

_JOB = Path(__file__).with_name("megatron_job.py")


@pytest.mark.timeout(200)
def test_counts_and_loss_scale_follow_the_plan_and_losses_do_not_change(tmp_path: Path) -> None:
    with launch([str(_JOB), "--out", str(tmp_path)], world=2) as job:
        job.wait(150.0)
    first, second = (json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2))
    print(f"megatron-core: {first['core']}")
    counts = list(zip(first["steered"]["counts"], second["steered"]["counts"], strict=True))
    assert counts == [(8, 8)] * 3 + [(13, 3)] * 6 + [(2, 14)] * 11
    assert first["steered"]["scales"][4] == 13 * 2 / 16
    assert set(first["even"]["scales"]) == {1.0}
    # what counts consumed samples sees the even number
    assert set(first["steered"]["between"]) == {8}
    pairs = list(zip(first["even"]["losses"], first["steered"]["losses"], strict=True))
    assert max(abs(a - b) for a, b in pairs) < 1e-5
    assert pairs[-1][0] < pairs[0][0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([object(), object()], "virtual stages"),
        (SimpleNamespace(config=SimpleNamespace(num_moe_experts=8)), "mixture of experts"),
        (SimpleNamespace(config=SimpleNamespace(mtp_num_layers=1)), "multi-token"),
    ],
)
def test_what_cannot_be_steered_is_refused_with_the_reason(model: object, message: str) -> None:
    core = SimpleNamespace(num_microbatches_calculator=None, parallel_state=None)
    with pytest.raises(PlanError, match=message):
        Megatron(model, core=core)
