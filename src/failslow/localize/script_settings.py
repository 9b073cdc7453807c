"""What planning a pause must know: where the workers are, and how much is to be measured. Pure.

WorkerPlace(rank=5, node="gpu-17", host="8c1f…", device="NVIDIA H200", device_id="GPU-5fd4…")
ScriptSettings(budget_s=4.0, gemm_size=8192, sizes_bytes=(16777216, 33554432, 67108864), …)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from failslow.config import LocalizeConfig
from failslow.errors import ConfigError
from failslow.records import RankProfile

__all__ = ["MOST_AWAITED", "ScriptSettings", "WorkerPlace", "endpoint", "is_cpu"]

MOST_AWAITED = 64
"""A stage with more workers is waited for by those of its own node only: each would ask for each.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where a worker runs, as far as measuring must know."""

    rank: int
    node: str
    """What the job takes for a host: what a verdict names."""
    host: str = ""
    """The physical machine (its boot id); "" = the node."""
    device: str = "cpu"
    """Model of the device ("cpu", "cpu Intel(R) Xeon(R)", "NVIDIA H200"): only equal ones
    compare."""
    device_id: str = ""
    """Which of the machine's devices ("GPU-5fd4f087-…"); "" = one that its workers share: the CPU
    is one, whatever its cores."""
    nic: str = ""
    """Network card it sends through; "" unknown, then taken as shared by the node's workers."""
    trees: bool = False
    """Its all-reduces are told to run along trees, not rings."""

    @classmethod
    def of(cls, profile: RankProfile) -> WorkerPlace:
        """As its agent tells."""
        return cls(
            rank=profile.rank,
            node=profile.node,
            host=profile.host,
            device=profile.device,
            device_id=profile.device_id,
            nic=profile.nic,
            trees=profile.trees,
        )

    @property
    def machine(self) -> str:
        """The physical host."""
        return self.host or self.node

    @property
    def unit(self) -> tuple[str, str]:
        """What computes for it: whom it shares this with it takes turns with."""
        return self.machine, self.device_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSettings:
    """How much is measured. Zeros and "" stand for what suits the device (`for_device`)."""

    budget_s: float = 4.0
    """Seconds the stages may take by estimate."""
    peers: int = 3
    """Healthy workers beside the suspects, and endpoints beside a suspect link's own."""
    most_ranks: int = 64
    """Workers that compute, at most."""
    most_endpoints: int = 16
    """Jobs of so many nodes, or fewer, have their whole ring measured where nobody is suspected."""
    all_pairs: int = 4
    """Groups of so many nodes, or fewer, have every pair measured."""
    gemm_dtype: str = ""
    gemm_size: int = 0
    """Rows and columns of the square matrices."""
    gemm_s: float = 0.0
    """Seconds a worker computes, besides warming up."""
    rounds: int = 0
    """Times each worker computes, apart from each other: a CPU has slow spells of its own (what
    else its machine does), and the faster round counts."""
    gemm_repeats: int = 5
    """...and how many products at least."""
    sizes_bytes: tuple[int, ...] = ()
    """Of transfers."""
    repeats: int = 3
    """Transfers of each size."""
    bandwidth: float = 0.0
    """Bytes per second a healthy link is expected to carry, for the estimate."""
    connect_s: float = 0.0
    """Seconds until a pair is connected, for the estimate."""

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_s <= 60.0:
            raise ConfigError(f"budget_s ({self.budget_s:g}) must be above 0 and at most 60")
        if not 0 <= self.gemm_size <= 65536 or self.gemm_repeats < 1 or self.repeats < 1:
            raise ConfigError(
                f"gemm_size ({self.gemm_size}) must be 0 to 65536, gemm_repeats "
                f"({self.gemm_repeats}) and repeats ({self.repeats}) at least 1"
            )
        if any(not 1 <= size <= 2**31 for size in self.sizes_bytes):
            raise ConfigError(f"sizes_bytes {self.sizes_bytes} must each be 1 to 2147483648")
        if not 0 <= self.rounds <= 10:
            raise ConfigError(f"rounds ({self.rounds}) must be 0 to 10")
        if self.peers < 0 or self.most_ranks < 1 or min(self.most_endpoints, self.all_pairs) < 0:
            raise ConfigError(
                f"peers ({self.peers}), most_endpoints ({self.most_endpoints}) and all_pairs "
                f"({self.all_pairs}) must be at least 0, most_ranks ({self.most_ranks}) 1"
            )

    @classmethod
    def from_config(cls, config: LocalizeConfig) -> ScriptSettings:
        """A fifth of the pause's limit is left for what is slow and for coming back."""
        return cls(
            budget_s=0.8 * config.pause_limit_s,
            gemm_dtype=config.gemm_dtype or "",
            gemm_size=config.gemm_size or 0,
            gemm_repeats=config.gemm_repeats or 5,
            sizes_bytes=config.p2p_sizes_bytes or (),
            repeats=config.p2p_repeats or 3,
        )

    def for_device(self, device: str) -> ScriptSettings:
        """With every setting that was left open filled in."""
        on_cpu = is_cpu(device)
        kilo = 1024
        sizes = (256 * kilo, kilo**2, 4 * kilo**2) if on_cpu else (16 << 20, 32 << 20, 64 << 20)
        return replace(
            self,
            # half precision is there on every GPU a job trains on; the CPU's matrices fit its cache
            gemm_dtype=self.gemm_dtype or ("float32" if on_cpu else "float16"),
            gemm_size=self.gemm_size or (384 if on_cpu else 8192),
            gemm_s=self.gemm_s or 0.15,
            rounds=self.rounds or (2 if on_cpu else 1),
            sizes_bytes=self.sizes_bytes or sizes,
            bandwidth=self.bandwidth or (125e6 if on_cpu else 5e9),
            connect_s=self.connect_s or (0.03 if on_cpu else 0.4),
        )


def is_cpu(device: str) -> bool:
    """Whether a device's model is the host's own processor: "cpu", "cpu Intel(R) Xeon(R)"."""
    return device == "cpu" or device.startswith("cpu ")


def endpoint(place: WorkerPlace) -> tuple[str, str]:
    """(node, network card): what a worker's transfers to other nodes go through."""
    return place.node, place.nic
