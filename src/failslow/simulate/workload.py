"""The training job a simulation runs: a transformer, how it is split, and what its parts cost.

In: settings. Out: operations and bytes of one micro-batch, of one step. Formulas: Narayanan et
al., SC '21 (arXiv 2104.04473), §5; a layer has 12 h² parameters (4 h² of attention, 8 h² of the
MLP, the latter once an expert), backward costs twice forward.

    Workload(layers=32, hidden=4096, tp=4, pp=4, dp=8, micro_batches=16).parameters    # 6.9e9
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from failslow.config import StageConfig
from failslow.simulate.schedule import Schedule

__all__ = ["Workload"]


class Workload(StageConfig):
    """A transformer and its parallel layout; ranks count tp, then cp, then dp, then pp."""

    layers: int = Field(16, ge=1)
    hidden: int = Field(2048, ge=1)
    sequence: int = Field(4096, ge=1)
    vocabulary: int = Field(50_000, ge=0)
    """The last stage computes logits over it; 0 leaves that out."""
    micro_batch: int = Field(1, ge=1)
    """Sequences in a micro-batch."""
    micro_batches: int = Field(16, ge=1)
    """Of one replica in a step."""
    tp: int = Field(2, ge=1)
    pp: int = Field(2, ge=1)
    dp: int = Field(4, ge=1)
    cp: int = Field(1, ge=1)
    """Workers a sequence is split over (ring attention)."""
    ep: int = Field(1, ge=1)
    """Replicas the experts are spread over."""
    experts: int = Field(0, ge=0)
    experts_per_token: int = Field(2, ge=1)
    schedule: Schedule = "1f1b"
    vpp: int = Field(1, ge=1)
    """Chunks of the model on a stage; more than one needs schedule "interleaved"."""
    recompute: bool = False
    """Backward computes forward again."""
    distributed_optimizer: bool = True
    """Gradients are reduce-scattered, parameters all-gathered; else gradients are all-reduced."""
    overlap_gradients: bool = True
    """Gradients are reduced in buckets while the last micro-batch is still computed."""
    gradient_buckets: int = Field(8, ge=1, le=256)
    collective: Literal["ring", "tree"] = "ring"
    """Of all-reduces between replicas."""
    efficiency: float = Field(0.5, gt=0, le=1)
    """Of the devices' peak, in the matrix products."""
    optimizer_ms: float = Field(10.0, ge=0)
    """Clipping and update, after the gradients are reduced."""

    @model_validator(mode="after")
    def _check(self) -> Workload:
        chunks = self.pp * self.vpp
        if self.layers % chunks:
            raise ValueError(
                f"layers ({self.layers}) must be a multiple of pp · vpp ({chunks}); change one"
            )
        if self.vpp > 1 and self.schedule != "interleaved":
            raise ValueError(
                f'vpp ({self.vpp}) needs schedule "interleaved"; schedule is "{self.schedule}"'
            )
        if self.schedule == "interleaved" and self.micro_batches % self.pp:
            raise ValueError(
                f"micro_batches ({self.micro_batches}) must be a multiple of pp ({self.pp}) for "
                'schedule "interleaved"'
            )
        if self.ep > 1 and (self.dp % self.ep or self.experts % self.ep or not self.experts):
            raise ValueError(
                f"ep ({self.ep}) must divide dp ({self.dp}) and experts ({self.experts})"
            )
        return self

    @property
    def ranks(self) -> int:
        """Devices the job needs."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def ranks_per_worker(self) -> int:
        """Devices that share a stage of a replica."""
        return self.tp * self.cp

    @property
    def layers_per_chunk(self) -> int:
        """Layers of each chunk of the model."""
        return self.layers // (self.pp * self.vpp)

    @property
    def parameters(self) -> float:
        """Of the whole model."""
        return self.layers * self._layer_parameters + self.vocabulary * self.hidden

    @property
    def _layer_parameters(self) -> float:
        return self.hidden**2 * (4.0 + 8.0 * max(self.experts, 1))

    @property
    def tokens(self) -> int:
        """Of a step, all replicas."""
        return self.sequence * self.micro_batch * self.micro_batches * self.dp

    def forward_flop(self, *, last_chunk: bool) -> float:
        """Of one device, for one micro-batch through one chunk."""
        b, s, h = self.micro_batch, self.sequence, self.hidden
        active = self.experts_per_token if self.experts else 1
        layer = 2.0 * b * s * h * h * (4 + 8 * active) + 4.0 * b * s * s * h
        logits = 2.0 * b * s * h * self.vocabulary if last_chunk else 0.0
        return (self.layers_per_chunk * layer + logits) / self.ranks_per_worker

    @property
    def activation_bytes(self) -> float:
        """Of a micro-batch between two layers, on one device (bf16, split over tp and cp)."""
        return 2.0 * self.micro_batch * self.sequence * self.hidden / self.ranks_per_worker

    @property
    def chunk_parameters(self) -> float:
        """Of one chunk, on one device; experts are spread over ep replicas."""
        attention, experts = 4.0 * self.hidden**2, 8.0 * self.hidden**2 * max(self.experts, 1)
        return self.layers_per_chunk * (attention + experts / self.ep) / self.tp
