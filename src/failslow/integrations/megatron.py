"""Megatron-LM: each replica's number of micro-batches, and the loss scale that goes with it.

In: megatron-core's own state (its parallel groups, its micro-batch calculator). Out: in the course
of a training step `get_num_microbatches()` gives this replica's number, losses are scaled so that
the update is that of the even split, and the data iterator gives this replica's micro-batches:

    steering = Megatron(model)
    forward_step = steering.scaled(forward_step)
    data = steering.data(lambda index: collate([train_set[i] for i in rows_of(index)]))
    while iteration < args.train_iters:
        update_num_microbatches(args.consumed_train_samples)
        with steering.step(iteration):
            train_step(forward_step, data, model, optimizer, scheduler, config)

Tested on megatron-core 0.16.1 itself on CPUs: its schedules without pipelining and 1F1B, its DDP
and gradient finalisation. UNTESTED ON GPUs. Megatron divides every loss by the replica's own number
of micro-batches and then averages over replicas, so it is scaled by (own number · replicas / all);
with `calculate_per_token_loss` it divides by the tokens of all replicas, and nothing is to be
scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

from failslow.errors import PlanError
from failslow.mitigate.coordinator import Coordinator
from failslow.mitigate.share import Share

__all__ = ["Megatron"]


class Megatron:
    """Made by every rank after `initialize_megatron` and the model, all together.

    model: as `setup_model_and_optimizer` gives it, one module or a list of one.
    core: stands in for the package `megatron.core` in tests. Further arguments are `Coordinator`'s.
    While a ramp makes the global batch larger its micro-batches are split in the proportions of a
    plan for the full one.
    Raises PlanError for what cannot be steered: interleaved pipelines, and losses that Megatron
    scales by itself (mixture of experts, multi-token prediction).
    """

    def __init__(self, model: Any, *, core: Any = None, **arguments: Any) -> None:
        self._calculators = _part(core, "num_microbatches_calculator")
        groups = _part(core, "parallel_state")
        modules = model if isinstance(model, (list, tuple)) else [model]
        if len(modules) != 1:
            raise PlanError(
                f"an interleaved pipeline of {len(modules)} chunks needs micro-batches in "
                "multiples of its stages; train without virtual stages to be steered"
            )
        self._config = _config_of(modules[0])
        for setting, what in (
            ("num_moe_experts", "a mixture of experts' auxiliary loss"),
            ("mtp_num_layers", "multi-token prediction's loss"),
        ):
            if getattr(self._config, setting, None):
                raise PlanError(
                    f"{setting} is set: {what} is scaled by Megatron itself, per replica; "
                    "micro-batches cannot be redistributed"
                )
        tp = groups.get_tensor_model_parallel_world_size()
        context = groups.get_context_parallel_rank()
        self._replicas: int = groups.get_data_parallel_world_size()
        # Megatron's 1F1B needs no micro-batch for every stage
        arguments.setdefault("least", 1)
        exchanges = self._exchanges(modules[0], groups) | dict(
            arguments.pop("exchanges", None) or {}
        )
        self._coordinator = Coordinator(
            self._full_batch() // self._microbatch_size(),
            grid=(
                groups.get_pipeline_model_parallel_world_size(),
                self._replicas,
                tp * groups.get_context_parallel_world_size(),
            ),
            place=(
                groups.get_pipeline_model_parallel_rank(),
                groups.get_data_parallel_rank(),
                context * tp + groups.get_tensor_model_parallel_rank(),
            ),
            model=modules[0],
            exchanges=exchanges,
            **arguments,
        )
        self._share: Share | None = None

    @property
    def coordinator(self) -> Coordinator:
        """Whose counts are gone by."""
        return self._coordinator

    @property
    def loss_scale(self) -> float:
        """What this replica's losses are multiplied by in the present step."""
        share = self._share
        if share is None or getattr(self._config, "calculate_per_token_loss", False):
            return 1.0
        return float(share.count * self._replicas / share.size)

    @contextmanager
    def step(self, iteration: int) -> Iterator[Share]:
        """Around `train_step`, and nothing that counts samples: afterwards `get_num_microbatches()`
        gives the even number again."""
        calculator = self._calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        with self._coordinator.step(iteration, self._microbatches()) as share:
            even = calculator.num_micro_batches
            self._share, calculator.num_micro_batches = share, share.count
            share.work = float(self._samples())
            try:
                yield share
            finally:
                self._share, calculator.num_micro_batches = None, even

    def scaled(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `forward_step_func`, with `loss_scale` on the losses it is trained by."""

        @wraps(forward_step)
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            output, loss_func = forward_step(*arguments, **keywords)

            def scaled_loss(*of: Any, **how: Any) -> Any:
                result = loss_func(*of, **how)
                if how.get("non_loss_data") or self.loss_scale == 1.0:
                    return result
                return (result[0] * self.loss_scale, *result[1:])

            return output, scaled_loss

        return wrapper

    def data(self, fetch: Callable[[int], Any]) -> Iterator[Any]:
        """A `data_iterator`: `fetch(index)` of each micro-batch this replica runs.

        index: of the whole run, counted from this iterator's start. It is asked for at the moment
        of use, since who runs a micro-batch is settled only when its step begins: let `fetch` read
        ahead by itself where reading is slow.
        """
        base = 0
        while True:
            share = self._share
            if share is None:
                raise PlanError("data asked for outside a step; use `with steering.step(…)`")
            for index in share.indices:
                yield fetch(base + index)
            base += share.size

    def _exchanges(self, model: Any, groups: Any) -> dict[str, Any]:
        """What else replicas exchange in every micro-batch."""
        found, config = {}, self._config
        delayed = getattr(config, "fp8_recipe", "delayed") == "delayed"
        within = getattr(config, "tp_only_amax_red", False)
        if getattr(config, "fp8", None) and delayed and not within:
            group = groups.get_amax_reduction_group(with_context_parallel=True)
            found["FP8's delayed scaling, without tp_only_amax_red"] = group
        ddp = getattr(model, "ddp_config", None)
        used = getattr(ddp, "use_megatron_fsdp", False) or getattr(ddp, "use_custom_fsdp", False)
        shards = getattr(ddp, "data_parallel_sharding_strategy", "no_shard")
        if used and "grads" in shards:
            group = groups.get_data_parallel_group(with_context_parallel=True)
            found[f"Megatron-FSDP's {shards}"] = group
        return found

    def _microbatches(self) -> int:
        """Of the present global batch, which a ramp makes larger."""
        return self._samples() // self._microbatch_size()

    def _full_batch(self) -> int:
        """Samples of the global batch at the end of a ramp: plans are made for it, as the small
        ones before have too few micro-batches to be split well."""
        calculator = self._calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        full = int(getattr(calculator, "global_batch_size", None) or self._samples())
        return full - full % (self._microbatch_size() * self._replicas)

    def _microbatch_size(self) -> int:
        return int(self._calculators.get_micro_batch_size())

    def _samples(self) -> int:
        return int(self._calculators.get_current_running_global_batch_size())


def _part(core: Any, name: str) -> Any:
    return getattr(core, name) if core is not None else import_module(f"megatron.core.{name}")


def _config_of(model: Any) -> Any:
    """The model's settings, whatever is wrapped around it."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return getattr(model, "config", None)
