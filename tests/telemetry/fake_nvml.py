"""A made-up NVML, for a machine without GPUs: the functions and constants of the real module
`pynvml`, over GPUs whose state a test sets.

`test_the_made_up_module_has_the_names_of_the_real_one` holds it against the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

__all__ = ["FakeGpu", "FakeNvml"]


class NVMLError(Exception):
    """As the real one: an error code, and its text."""

    def __init__(self, value: int, text: str = "Not Supported") -> None:
        super().__init__(text)
        self.value = value


@dataclass
class FakeGpu:
    """One GPU. What is None is not supported."""

    name: str = "NVIDIA H200"
    sm_percent: int | None = 98
    sm_mhz: int | None = 1980
    memory_mhz: int | None = 3201
    sm_max_mhz: int = 1980
    memory_max_mhz: int = 3201
    temperature_c: int | None = 55
    power_mw: int | None = 640_000
    limit_mw: int | None = 700_000
    reasons: int | None = 0
    ecc: dict[int, int] | None = field(default_factory=lambda: {0: 0, 1: 0})
    fields: dict[int, int] = field(default_factory=dict)
    """Field id -> unsigned 64-bit value; fields that are not here are not supported."""
    pids: Sequence[int] = ()
    id: str = "GPU-5fd4f087-86f3-5d43-b01a-e80dc5ab7ee2"
    lost: bool = False
    parts: Sequence[str] = ()
    """UUIDs of its MIG devices."""


class FakeNvml:
    """Stands in for the module."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_VALUE_TYPE_DOUBLE = 0
    NVML_VALUE_TYPE_UNSIGNED_INT = 1
    NVML_VALUE_TYPE_UNSIGNED_LONG = 2
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
    NVML_VALUE_TYPE_SIGNED_LONG_LONG = 4
    NVML_VALUE_TYPE_SIGNED_INT = 5
    NVML_VALUE_TYPE_UNSIGNED_SHORT = 6
    NVML_FI_DEV_PCIE_REPLAY_COUNTER = 94
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL = 52
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198
    nvmlClocksEventReasonGpuIdle = 0x001
    nvmlClocksEventReasonApplicationsClocksSetting = 0x002
    nvmlClocksEventReasonSwPowerCap = 0x004
    nvmlClocksEventReasonHwSlowdown = 0x008
    nvmlClocksEventReasonSyncBoost = 0x010
    nvmlClocksEventReasonSwThermalSlowdown = 0x020
    nvmlClocksEventReasonHwThermalSlowdown = 0x040
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x080
    nvmlClocksEventReasonDisplayClockSetting = 0x100

    def __init__(self, *gpus: FakeGpu, fails: str = "") -> None:
        self.gpus, self.fails = list(gpus), fails

    def nvmlInit(self) -> None:
        if self.fails:
            raise NVMLError(9, self.fails)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self.gpus[index].lost:
            raise NVMLError(15, "GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: FakeGpu | str) -> str:
        return handle if isinstance(handle, str) else handle.id

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeGpu, index: int) -> str:
        if index >= len(device.parts):
            raise NVMLError(6, "Not Found")
        return device.parts[index]

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.name

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        return SimpleNamespace(gpu=_known(handle.sm_percent), memory=40)

    def nvmlDeviceGetClockInfo(self, handle: FakeGpu, type: int) -> int:
        return _known({1: handle.sm_mhz, 2: handle.memory_mhz}[type])

    def nvmlDeviceGetMaxClockInfo(self, handle: FakeGpu, type: int) -> int:
        return {1: handle.sm_max_mhz, 2: handle.memory_max_mhz}[type]

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        assert sensor == 0
        return _known(handle.temperature_c)

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        return _known(handle.power_mw)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: FakeGpu) -> int:
        return _known(handle.limit_mw)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: FakeGpu) -> int:
        return _known(handle.reasons)

    def nvmlDeviceGetTotalEccErrors(self, handle: FakeGpu, errorType: int, counterType: int) -> int:
        assert counterType == 0
        if handle.ecc is None:
            raise NVMLError(3)
        return handle.ecc[errorType]

    def nvmlDeviceGetFieldValues(self, handle: FakeGpu, fieldIds: Sequence[int]) -> list[Any]:
        return [
            SimpleNamespace(
                fieldId=f,
                nvmlReturn=0 if f in handle.fields else 3,
                valueType=3,
                value=SimpleNamespace(ullVal=handle.fields.get(f, 0), uiVal=-1),
            )
            for f in fieldIds
        ]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in handle.pids]


def _known(value: int | None) -> int:
    if value is None:
        raise NVMLError(3)
    return value
