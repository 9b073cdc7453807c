"""The Megatron adapter, on megatron-core itself."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from job_launch import launch
from tests.mitigate.faked import faked_world

from failslow.errors import PlanError
from failslow.integrations.megatron import Megatron
from failslow.mitigate.batches import Split

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


def _core(calculator: SimpleNamespace, **sizes: int) -> SimpleNamespace:
    """What of `megatron.core` is asked, on rank 0."""
    groups: dict[str, Callable[[], int]] = {}
    for name in ("tensor_model", "context", "data", "pipeline_model"):
        groups[f"get_{name}_parallel_world_size"] = partial(int, sizes.get(name, 1))
        groups[f"get_{name}_parallel_rank"] = lambda: 0
    numbers = SimpleNamespace(
        _GLOBAL_NUM_MICROBATCHES_CALCULATOR=calculator,
        get_micro_batch_size=lambda: 2,
        get_current_running_global_batch_size=lambda: calculator.running,
    )
    return SimpleNamespace(
        num_microbatches_calculator=numbers, parallel_state=SimpleNamespace(**groups)
    )


def test_while_the_batch_grows_a_plan_is_for_the_full_one() -> None:
    calculator = SimpleNamespace(global_batch_size=130, running=8, num_micro_batches=1)
    with faked_world(4):
        steering = Megatron(None, core=_core(calculator, data=4))
        # four replicas' micro-batches of 2 do not make 130 samples: Megatron leaves 2 out
        assert steering.coordinator.counts == (16, 16, 16, 16)
        counts = []
        for split in ((16, 16, 16, 16), (8, 18, 19, 19)):
            steering.coordinator._hands.split = Split(counts=split)
            for samples in (8, 64, 128):
                calculator.running = samples
                with steering.step(0) as share:
                    counts.append((share.count, share.size, steering.loss_scale))
    assert counts == [
        (1, 4, 1.0), (8, 32, 1.0), (16, 64, 1.0),
        (1, 4, 1.0), (4, 32, 0.5), (8, 64, 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "ddp", "reason"),
    [
        ({"fp8": "hybrid"}, {}, "FP8's delayed scaling, without tp_only_amax_red"),
        ({"fp8": "hybrid", "tp_only_amax_red": True}, {}, ""),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, {}, ""),
        ({"fp8": None}, {"data_parallel_sharding_strategy": "optim_grads"}, ""),
        (
            {},
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
            "Megatron-FSDP's optim_grads_params",
        ),
        ({}, {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}, ""),
    ],
)
def test_what_replicas_exchange_in_every_micro_batch_forbids_unequal_counts(
    config: dict[str, Any], ddp: dict[str, Any], reason: str
) -> None:
    core = _core(SimpleNamespace(running=64, num_micro_batches=8), data=4)
    model = torch.nn.Linear(2, 2)
    model.config, model.ddp_config = SimpleNamespace(**config), SimpleNamespace(**ddp)  # type: ignore[assignment]
    with faked_world(4):
        for name in ("get_amax_reduction_group", "get_data_parallel_group"):
            setattr(core.parallel_state, name, lambda **_: dist.group.WORLD)
        found = Megatron(model, core=core).coordinator._hands.no_redistribution
    assert found == (reason and f"{reason}: communicates over replicas 0 to 3")


def test_a_replica_may_run_fewer_micro_batches_than_it_has_stages() -> None:
    calculator = SimpleNamespace(running=8, num_micro_batches=1)
    with faked_world(8):
        steering = Megatron(None, core=_core(calculator, data=2, pipeline_model=4))
        assert steering.coordinator.counts == (2, 2)
        with steering.step(0) as share:
            assert share.count == 2


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
