"""Replicas trained by megatron-core itself, steered: `python megatron_job.py --out FOLDER --pp 2`.

Its parallel groups, micro-batch calculator, schedules (without pipelining, and 1F1B), data-parallel
wrapper and gradient finalisation are its own; the model is two small layers, on CPUs. Out:
FOLDER/rank<r>.json: {"core": "0.16.1", "even": {run}, "steered": {run}, "per token": {run}}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron import core
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import nn
from torch.overrides import TorchFunctionMode

from failslow.capture import hook
from failslow.integrations.megatron import Megatron
from failslow.mailbox import Mailbox

SAMPLES, PER_MICROBATCH, WIDTH = 32, 2, 16


class OnCpu(TorchFunctionMode):
    """megatron-core asks for "cuda" by name in places, and for the current device in others."""

    def __init__(self) -> None:
        super().__init__()
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda *_: None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


class Stage(MegatronModule):  # type: ignore[misc]
    """One pipeline stage; what Megatron's schedules want of a model."""

    share_embeddings_and_output_weights, model_type = False, 1

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
        self._received: Any = None

    def set_input_tensor(self, tensor: Any) -> None:
        self._received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(rows if self.pre_process else self._received)
        return out


def _fetch(index: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(index)
    return torch.randn(1, PER_MICROBATCH, WIDTH, generator=made)


def train(steps: int, orders: dict[int, list[int]], *, per_token: bool = False) -> dict[str, Any]:
    """Orders come by rank 0's mailbox, as from its agent."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=2, hidden_size=WIDTH, num_attention_heads=2, use_cpu_initialization=True,
        pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32,
        calculate_per_token_loss=per_token,
    )  # fmt: skip
    torch.manual_seed(7 + parallel_state.get_pipeline_model_parallel_rank())
    stage = Stage(config)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), stage)
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)

    def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> Any:
        rows = next(data_iterator)

        def loss_func(output: torch.Tensor) -> Any:
            squares = (output - rows.roll(1, dims=2)).square()
            told = {"loss": squares.mean().detach().clone()}
            if not per_token:
                return squares.mean(), told
            return squares.sum(), torch.tensor(squares.numel(), dtype=torch.int), told

        return model(rows), loss_func

    steering = Megatron(model, listen_s=0.0)
    step_func, data = steering.scaled(forward_step), steering.data(_fetch)
    run: dict[str, Any] = {"losses": [], "counts": [], "between": [], "scales": []}
    for step in range(steps):
        box = hook.mailbox()
        if step in orders and dist.get_rank() == 0:
            assert box is not None
            plan = {"level": "S2", "predicted_slowdown": 1.0, "microbatches": orders[step]}
            letter = {"topic": "steer", "id": step, "level": "S2", "plan": plan}
            assert Mailbox.open(box.path).send(letter)
        model.zero_grad_buffer()
        with steering.step(step):
            count = calculator.get_num_microbatches()
            run["counts"].append(count)
            run["scales"].append(steering.loss_scale)
            told = get_forward_backward_func()(
                forward_step_func=step_func, data_iterator=data, model=model,
                num_microbatches=count, seq_length=1, micro_batch_size=PER_MICROBATCH,
            )  # fmt: skip
            for parameter in stage.parameters():
                parameter.grad = parameter.main_grad
            optimizer.step()
            optimizer.zero_grad()  # else the next backward adds to Megatron's buffer itself
        run["between"].append(calculator.get_num_microbatches())
        loss = torch.zeros(()) + sum(one["loss"] for one in told)  # of a last stage; else of none
        dist.all_reduce(loss)
        run["losses"].append(float(loss) / (SAMPLES // PER_MICROBATCH))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hook.install()
    dist.init_process_group("gloo")
    dist.barrier()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=options.pp)
    replicas = parallel_state.get_data_parallel_world_size()
    calculator.init_num_microbatches_calculator(
        dist.get_rank(), None, SAMPLES, PER_MICROBATCH, replicas, False
    )
    plan = {3: [13, 3], 9: [2, 14]}
    with OnCpu():
        report = {
            "core": core.__version__,
            "even": train(options.steps, {}),
            "steered": train(options.steps, plan),
            "per token": train(options.steps, plan, per_token=True),
        }
    (options.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    time.sleep(0.3)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
