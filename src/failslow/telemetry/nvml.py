"""NVIDIA GPUs by NVML: load, clocks, what throttles them, heat, power, errors, PCIe, NVLink.

In: the module `pynvml` (package nvidia-ml-py), imported when first needed. Out, of each GPU,

    {"gpu/0/sm_mhz": 1305.0, "gpu/0/sm_max_mhz": 1980.0, "gpu/0/throttle_thermal": 1.0, …}

What a GPU does not support is left out. A GPU that hangs makes NVML calls hang: `Background` keeps
that from the other samplers. Tests run a made-up module with the names of the real one; it has not
been run against a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from failslow.telemetry.base import Rates, Sampler

__all__ = ["Background", "NvmlSampler", "throttle_reasons"]

_REASONS = {
    "power": ("SwPowerCap", "HwPowerBrakeSlowdown"),
    "thermal": ("SwThermalSlowdown", "HwThermalSlowdown"),
    "hardware": ("HwSlowdown",),
    "other": ("SyncBoost", "ApplicationsClocksSetting", "DisplayClockSetting"),
}
"""Bits of the clocks' event reasons; "GpuIdle" slows nobody."""
_KIB = 1024
_MOST_PARTS = 7
"""Into which MIG may cut a GPU."""
_FIELDS = {
    "pcie_replays": ("NVML_FI_DEV_PCIE_REPLAY_COUNTER", 1),
    "pcie_tx_bytes": ("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", 1),
    "pcie_rx_bytes": ("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", 1),
    "nvlink_tx_bytes": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", _KIB),
    "nvlink_rx_bytes": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _KIB),
    "nvlink_crc_errors": ("NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 1),
    "nvlink_replay_errors": ("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 1),
    "nvlink_recovery_errors": ("NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", 1),
}
"""Counters asked for at once: what is reported, the field, its unit."""


def throttle_reasons(nvml: Any, mask: int) -> dict[str, bool]:
    """Which kinds of reasons hold the clocks down, by the bits NVML gives."""
    found = {}
    for kind, names in _REASONS.items():
        bits = 0
        for name in names:
            for stem in ("nvmlClocksThrottleReason", "nvmlClocksEventReason"):
                bits |= int(getattr(nvml, stem + name, 0))
        found[kind] = bool(mask & bits)
    return found


@dataclass(frozen=True)
class Gpu:
    """One GPU of the node."""

    index: int
    handle: Any
    name: str
    ids: frozenset[str] = frozenset()
    """Its UUID and those of the parts MIG has made of it, without "GPU-" and "MIG-"."""


class NvmlSampler:
    """workers: rank -> pid. devices: rank -> UUID of the GPU it told ("" none). load: gives the
    module, or raises ImportError."""

    def __init__(
        self,
        workers: Callable[[], Mapping[int, int]] = dict,
        *,
        devices: Callable[[], Mapping[int, str]] = dict,
        load: Callable[[], Any] = lambda: import_module("pynvml"),
    ) -> None:
        self._workers, self._devices, self._load = workers, devices, load
        self._nvml: Any = None
        self._gpus: Sequence[Gpu] = ()
        self._error = ""
        self._rates = Rates()
        self.ranks: dict[int, list[int]] = {}
        """By GPU, the workers that told they are on it, and those whose processes NVML saw there
        (containers hide them from it)."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Why there is no NVML."""
        return (self._error,) if self._error else ()

    @property
    def names(self) -> dict[int, str]:
        """Model of each GPU."""
        return {gpu.index: gpu.name for gpu in self._gpus}

    def sample(self, now_s: float) -> Mapping[str, float]:
        """As `Sampler.sample`."""
        if self._error or not (self._gpus or self._open()):
            return {}
        values: dict[str, float] = {}
        for gpu in self._gpus:
            for name, value in self._of(gpu, now_s):
                values[f"gpu/{gpu.index}/{name}"] = float(value)
        return values

    def _open(self) -> bool:
        try:
            self._nvml = self._load()
        except ImportError:
            self._error = (
                "no GPU telemetry: nvidia-ml-py is missing; pip install 'failslow[nvidia]'"
            )
            return False
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._gpus = [gpu for i in range(count) if (gpu := self._find(i)) is not None]
        except self._nvml.NVMLError as error:
            self._error = f"no GPU telemetry: NVML says {error}"
            return False
        if not self._gpus:
            self._error = "no GPU telemetry: NVML sees no GPU"
        return bool(self._gpus)

    def _find(self, index: int) -> Gpu | None:
        """None for one that has fallen off its bus: the others still tell."""
        nvml = self._nvml
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = _text(nvml.nvmlDeviceGetName(handle))
            return Gpu(index, handle, name, frozenset(self._ids(handle)))
        return None

    def _ids(self, handle: Any) -> Iterator[str]:
        nvml = self._nvml
        with suppress(nvml.NVMLError):
            yield _bare(_text(nvml.nvmlDeviceGetUUID(handle)))
        for part in range(_MOST_PARTS):
            with suppress(nvml.NVMLError):
                mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, part)
                yield _bare(_text(nvml.nvmlDeviceGetUUID(mig)))

    def _of(self, gpu: Gpu, now_s: float) -> Iterator[tuple[str, float]]:
        nvml, handle = self._nvml, gpu.handle
        # a GPU supports what it supports: each question stands alone
        with suppress(nvml.NVMLError):
            load = nvml.nvmlDeviceGetUtilizationRates(handle)
            yield "sm_share", load.gpu / 100
            yield "memory_share", load.memory / 100
        for name, kind in (("sm", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM)):
            with suppress(nvml.NVMLError):
                yield f"{name}_mhz", nvml.nvmlDeviceGetClockInfo(handle, kind)
                yield f"{name}_max_mhz", nvml.nvmlDeviceGetMaxClockInfo(handle, kind)
        with suppress(nvml.NVMLError):
            yield "temperature_c", nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        with suppress(nvml.NVMLError):
            yield "power_w", nvml.nvmlDeviceGetPowerUsage(handle) / 1000
            yield "power_limit_w", nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        # the first name is the newer; a driver may know only the second
        for ask in ("EventReasons", "ThrottleReasons"):
            with suppress(nvml.NVMLError, AttributeError):
                mask = getattr(nvml, f"nvmlDeviceGetCurrentClocks{ask}")(handle)
                for kind, holds in throttle_reasons(nvml, mask).items():
                    yield f"throttle_{kind}", float(holds)
                break
        for name, kind in (
            ("ecc_corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("ecc_uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ):
            with suppress(nvml.NVMLError):
                count = nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC)
                yield from self._rate(f"{gpu.index}/{name}", name, count, now_s)
        yield from self._counters(gpu, now_s)
        self._find_ranks(gpu)

    def _counters(self, gpu: Gpu, now_s: float) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        known = {
            name: (getattr(nvml, field), unit)
            for name, (field, unit) in _FIELDS.items()
            if hasattr(nvml, field)  # older modules lack some
        }
        with suppress(nvml.NVMLError):
            answers = nvml.nvmlDeviceGetFieldValues(gpu.handle, [f for f, _ in known.values()])
            errors = 0.0
            counted = False
            for (name, (_, unit)), answer in zip(known.items(), answers, strict=True):
                if answer.nvmlReturn != nvml.NVML_SUCCESS:
                    continue
                count = _number(nvml, answer) * unit
                if name.endswith("_errors"):
                    errors, counted = errors + count, True
                else:
                    yield from self._rate(f"{gpu.index}/{name}", name, count, now_s)
            if counted:
                yield from self._rate(f"{gpu.index}/nvlink", "nvlink_errors", errors, now_s)

    def _rate(self, key: str, name: str, count: float, now_s: float) -> Iterable[tuple[str, float]]:
        rate = self._rates.update(key, count, now_s)
        return () if rate is None else ((f"{name}_per_s", rate),)

    def _find_ranks(self, gpu: Gpu) -> None:
        found = {rank for rank, id in self._devices().items() if id and _bare(id) in gpu.ids}
        pids = {pid: rank for rank, pid in self._workers().items()}
        with suppress(self._nvml.NVMLError):
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
            found |= {pids[p.pid] for p in running if p.pid in pids}
        self.ranks[gpu.index] = sorted(found)


def _number(nvml: Any, answer: Any) -> float:
    kinds = {
        "DOUBLE": "dVal",
        "UNSIGNED_INT": "uiVal",
        "UNSIGNED_LONG": "ulVal",
        "UNSIGNED_LONG_LONG": "ullVal",
        "SIGNED_LONG_LONG": "sllVal",
        "SIGNED_INT": "siVal",
        "UNSIGNED_SHORT": "usVal",
    }
    for kind, member in kinds.items():
        if answer.valueType == getattr(nvml, f"NVML_VALUE_TYPE_{kind}", None):
            return float(getattr(answer.value, member))
    raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)


def _bare(id: str) -> str:
    """
    >>> _bare("GPU-5fd4f087-86f3"), _bare("MIG-5fd4f087-86f3")
    ('5fd4f087-86f3', '5fd4f087-86f3')
    """
    return id.partition("-")[2]


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


class Background:
    """Runs a sampler that may take long, or hang, in a thread; gives what it found last.

    stale_s: what was found longer ago is no longer given.
    """

    def __init__(self, sampler: Sampler, *, what: str, stale_s: float) -> None:
        self.sampler, self._what, self._stale_s = sampler, what, stale_s
        self._thread: threading.Thread | None = None
        self._found: tuple[float, Mapping[str, float]] = (-1e9, {})
        self._asked_s = -1e9
        self._hangs = False
        self._error = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """The sampler's own, and that it does not answer."""
        late = (f"{self._what} does not answer",) if self._hangs else ()
        failed = (self._error,) if self._error else ()
        return (*self.sampler.missing, *late, *failed)

    def sample(self, now_s: float) -> Mapping[str, float]:
        """As `Sampler.sample`, one call late."""
        found_s, values = self._found
        if self._thread is not None and self._thread.is_alive():
            self._hangs = now_s - self._asked_s > self._stale_s
        elif not self._error:
            self._hangs, self._asked_s = False, now_s
            self._thread = threading.Thread(
                target=self._run, args=(now_s,), name=f"failslow-{self._what}", daemon=True
            )
            self._thread.start()
        return values if now_s - found_s <= self._stale_s else {}

    def _run(self, now_s: float) -> None:
        try:
            self._found = now_s, self.sampler.sample(now_s)
        except Exception as error:  # said once, and costs these numbers only
            self._error = f"{self._what} failed: {error!r}"
