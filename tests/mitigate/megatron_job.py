"""Two replicas trained by Megatron's schedule, steered: `python megatron_job.py --out FOLDER`.

Uses megatron-core where it is installed; else STAND-INS with its signatures and its arithmetic
(0.16: `num_microbatches_calculator`, `parallel_state`, `forward_backward_no_pipelining`). Out:
FOLDER/rank<r>.json: {"core": "0.16.1" or "stand-in", "even": {run}, "steered": {run}}.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from failslow.capture import hook
from failslow.integrations.megatron import Megatron
from failslow.mailbox import Mailbox

SAMPLES, PER_MICROBATCH = 32, 2


def _standins() -> Any:
    """What of megatron.core the adapter and this job touch, for two data-parallel ranks."""
    calculator = SimpleNamespace(num_micro_batches=SAMPLES // PER_MICROBATCH // 2)
    one: Callable[[], int] = lambda: 1  # noqa: E731
    zero: Callable[[], int] = lambda: 0  # noqa: E731

    def forward_backward_no_pipelining(
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any],
        model: nn.Module,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
    ) -> list[Any]:
        del seq_length, micro_batch_size, forward_only
        told = []
        for _ in range(num_microbatches):
            output, loss_func = forward_step_func(data_iterator, model)
            loss, reduced = loss_func(output)
            (loss / num_microbatches).backward()
            told.append(reduced)
        return told

    return SimpleNamespace(
        __version__="stand-in",
        num_microbatches_calculator=SimpleNamespace(
            _GLOBAL_NUM_MICROBATCHES_CALCULATOR=calculator,
            get_num_microbatches=lambda: calculator.num_micro_batches,
            get_micro_batch_size=lambda: PER_MICROBATCH,
            get_current_running_global_batch_size=lambda: SAMPLES,
        ),
        parallel_state=SimpleNamespace(
            get_tensor_model_parallel_world_size=one,
            get_tensor_model_parallel_rank=zero,
            get_context_parallel_world_size=one,
            get_context_parallel_rank=zero,
            get_pipeline_model_parallel_world_size=one,
            get_pipeline_model_parallel_rank=zero,
            get_data_parallel_world_size=dist.get_world_size,
            get_data_parallel_rank=dist.get_rank,
        ),
        schedule=forward_backward_no_pipelining,
        config=SimpleNamespace(num_moe_experts=None, mtp_num_layers=None),
    )


def _core() -> Any:
    if importlib.util.find_spec("megatron") is None:
        return _standins()
    parts = {
        name: importlib.import_module(f"megatron.core.{name}")
        for name in ("num_microbatches_calculator", "parallel_state")
    }
    parts["parallel_state"].initialize_model_parallel()
    parts["num_microbatches_calculator"].init_num_microbatches_calculator(
        dist.get_rank(), None, SAMPLES, PER_MICROBATCH, 2, False
    )
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    return SimpleNamespace(
        __version__=importlib.import_module("megatron.core").__version__,
        schedule=schedules.forward_backward_no_pipelining,
        config=importlib.import_module("megatron.core.transformer").TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=1
        ),
        **parts,
    )


class OnCpu(TorchFunctionMode):
    """megatron-core asks for "cuda" by name in places."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


def _forward_step(data_iterator: Iterator[Any], model: nn.Module) -> Any:
    rows = next(data_iterator)

    def loss_func(output: torch.Tensor) -> Any:
        loss = (output - rows.roll(1, dims=1)).square().mean()
        return loss, {"loss": loss.detach().clone()}

    return model(rows), loss_func


def _fetch(index: int) -> torch.Tensor:
    return torch.randn(PER_MICROBATCH, 16, generator=torch.Generator().manual_seed(index))


def train(core: Any, steps: int, orders: dict[int, list[int]]) -> dict[str, Any]:
    """Orders come by rank 0's mailbox, as from its agent."""
    torch.manual_seed(7)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    # what its schedule wants of a model besides
    model.config, model.model_type = core.config, None
    model.set_input_tensor = lambda _: None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steering = Megatron(model, core=core, listen_s=0.0)
    step_func, data = steering.scaled(_forward_step), steering.data(_fetch)
    calculator = core.num_microbatches_calculator
    run: dict[str, Any] = {"losses": [], "counts": [], "between": [], "scales": []}
    for step in range(steps):
        box = hook.mailbox()
        if step in orders and dist.get_rank() == 0:
            assert box is not None
            plan = {"level": "S2", "predicted_slowdown": 1.0, "microbatches": orders[step]}
            letter = {"topic": "steer", "id": step, "level": "S2", "plan": plan}
            assert Mailbox.open(box.path).send(letter)
        with steering.step(step):
            count = calculator.get_num_microbatches()
            run["counts"].append(count)
            run["scales"].append(steering.loss_scale)
            with OnCpu():
                told = core.schedule(
                    forward_step_func=step_func, data_iterator=data, model=model,
                    num_microbatches=count, seq_length=1, micro_batch_size=PER_MICROBATCH,
                )  # fmt: skip
            for parameter in model.parameters():  # as Megatron's DDP: averaged over replicas
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
        run["between"].append(calculator.get_num_microbatches())
        loss = torch.stack([x["loss"] for x in told]).sum()
        dist.all_reduce(loss)
        run["losses"].append(float(loss) / (SAMPLES // PER_MICROBATCH))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hook.install()
    dist.init_process_group("gloo")
    dist.barrier()
    core = _core()
    report = {
        "core": core.__version__,
        "even": train(core, options.steps, {}),
        "steered": train(core, options.steps, {3: [13, 3], 9: [2, 14]}),
    }
    (options.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    time.sleep(0.3)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
