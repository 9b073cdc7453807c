"""The Megatron adapter, on megatron-core itself."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from job_launch import launch

from failslow.errors import PlanError
from failslow.integrations.megatron import Megatron

_JOB = Path(__file__).with_name("megatron_job.py")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_counts_and_loss_scale_follow_the_plan_and_losses_do_not_change(
    tmp_path: Path, stages: int
) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install --no-deps megatron-core==0.16.1")
    with launch([str(_JOB), "--out", str(tmp_path), "--pp", str(stages)], world=2 * stages) as job:
        job.wait(150.0)
    reports = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2 * stages)]
    print(f"megatron-core: {reports[0]['core']}")
    even, steered, per_token = (
        [r[run] for r in reports] for run in ("even", "steered", "per token")
    )
    for first, second in (steered[:2], steered[-2:], per_token[:2]):  # each stage's replicas
        counts = list(zip(first["counts"], second["counts"], strict=True))
        assert counts == [(8, 8)] * 3 + [(13, 3)] * 6 + [(2, 14)] * 11
        # what counts consumed samples sees the even number
        assert set(first["between"]) == {8}
    assert steered[0]["scales"][4] == 13 * 2 / 16
    assert set(even[0]["scales"]) == set(per_token[0]["scales"]) == {1.0}
    losses = even[0]["losses"]
    for run in (steered[0], per_token[0]):
        assert max(abs(a - b) for a, b in zip(losses, run["losses"], strict=True)) < 1e-5
    assert losses[-1] < losses[0]


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
