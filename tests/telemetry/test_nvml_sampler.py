"""GPU telemetry from a made-up NVML (`fake_nvml`): there is no GPU here."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest
from tests.telemetry.fake_nvml import FakeGpu, FakeNvml

from failslow.telemetry.collect import node_samplers
from failslow.telemetry.nvml import Background, NvmlSampler


def test_the_made_up_module_has_the_names_of_the_real_one() -> None:
    real = import_module("pynvml")
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert len(names) > 30
    for name in names:
        fake, true = getattr(FakeNvml, name), getattr(real, name)
        if name.startswith("nvml") and callable(fake):
            expected = list(inspect.signature(true).parameters)
            assert list(inspect.signature(fake).parameters)[1:] == expected, name
        elif name != "NVMLError":
            assert fake == true, name
    assert issubclass(real.NVMLError, Exception)
    assert {"fieldId", "nvmlReturn", "valueType", "value"} <= {
        name for name, *_ in real.c_nvmlFieldValue_t._fields_
    }


def test_without_the_library_it_says_so_once_and_gives_nothing() -> None:
    """The real module, on a machine without a driver."""
    sampler = NvmlSampler()
    assert sampler.sample(0.0) == {}
    assert sampler.sample(1.0) == {}
    (text,) = sampler.missing
    assert "NVML" in text


def test_without_the_module_it_says_how_to_get_it() -> None:
    def load() -> Any:
        raise ImportError

    sampler = NvmlSampler(load=load)
    assert sampler.sample(0.0) == {}
    assert sampler.missing == (
        "no GPU telemetry: nvidia-ml-py is missing; pip install 'failslow[nvidia]'",
    )


def test_a_gpus_state_is_told_with_its_limits() -> None:
    gpu = FakeGpu(pids=(700, 701))
    sampler = NvmlSampler(lambda: {4: 701, 5: 999}, load=lambda: FakeNvml(FakeGpu(), gpu))
    values = sampler.sample(0.0)
    assert {n.removeprefix("gpu/1/"): v for n, v in values.items() if "gpu/1/" in n} == {
        "sm_share": 0.98,
        "memory_share": 0.4,
        "sm_mhz": 1980.0,
        "sm_max_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "memory_max_mhz": 3201.0,
        "temperature_c": 55.0,
        "power_w": 640.0,
        "power_limit_w": 700.0,
        "throttle_power": 0.0,
        "throttle_thermal": 0.0,
        "throttle_hardware": 0.0,
        "throttle_other": 0.0,
    }
    assert sampler.names == {0: "NVIDIA H200", 1: "NVIDIA H200"}
    assert sampler.ranks == {0: [], 1: [4]}


def test_workers_whose_processes_a_container_hides_are_known_by_the_gpu_they_told() -> None:
    """Without, a verdict on a GPU in a container lacked all that NVML knows of it."""
    gpus = [FakeGpu(id=f"GPU-{i}", pids=(99_000 + i,)) for i in range(3)]
    gpus.append(FakeGpu(id="GPU-3", parts=("MIG-3a", "MIG-3b")))
    told = {4: "GPU-1", 5: "GPU-2", 6: "", 7: "GPU-3b"}  # to CUDA its part is a GPU
    sampler = NvmlSampler(
        lambda: {4: 17, 5: 18, 6: 19, 7: 20}, devices=lambda: told, load=lambda: FakeNvml(*gpus)
    )
    sampler.sample(0.0)
    assert sampler.ranks == {0: [], 1: [4], 2: [5], 3: [7]}


def test_a_gpu_that_is_lost_costs_only_its_own_numbers() -> None:
    gpus = [FakeGpu(), FakeGpu(lost=True), FakeGpu()]
    sampler = NvmlSampler(load=lambda: FakeNvml(*gpus))
    values = sampler.sample(0.0)
    assert {name.split("/")[1] for name in values} == {"0", "2"}
    assert sampler.missing == ()


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("GpuIdle", None),
        ("SwPowerCap", "power"),
        ("HwPowerBrakeSlowdown", "power"),
        ("SwThermalSlowdown", "thermal"),
        ("HwThermalSlowdown", "thermal"),
        ("HwSlowdown", "hardware"),
        ("ApplicationsClocksSetting", "other"),
        ("SyncBoost", "other"),
    ],
)
def test_what_holds_the_clocks_down_is_decoded(reason: str, kind: str | None) -> None:
    gpu = FakeGpu(reasons=getattr(FakeNvml, f"nvmlClocksEventReason{reason}"))
    values = NvmlSampler(load=lambda: FakeNvml(gpu)).sample(0.0)
    held = {
        name.removeprefix("gpu/0/throttle_")
        for name, value in values.items()
        if "throttle_" in name and value == 1.0
    }
    assert held == ({kind} if kind else set())


def test_counters_become_rates() -> None:
    nvml = FakeNvml
    gpu = FakeGpu()

    def at(n: int) -> Mapping[str, float]:
        gpu.ecc = {0: 4 * n, 1: n}
        gpu.fields = {
            nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER: 2 * n,
            nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES: 10**9 * n,
            nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: 10**6 * n,  # KiB
            nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: 3 * n,
            nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: 5 * n,
        }
        return {k: v for k, v in sampler.sample(2.0 * n).items() if k.endswith("_per_s")}

    sampler = NvmlSampler(load=lambda: FakeNvml(gpu))
    assert at(0) == {}
    assert at(1) == {
        "gpu/0/ecc_corrected_per_s": 2.0,
        "gpu/0/ecc_uncorrected_per_s": 0.5,
        "gpu/0/pcie_replays_per_s": 1.0,
        "gpu/0/pcie_tx_bytes_per_s": 5e8,
        "gpu/0/nvlink_rx_bytes_per_s": 512e6,
        "gpu/0/nvlink_errors_per_s": 4.0,
    }


def test_what_a_gpu_does_not_support_is_left_out() -> None:
    gpu = FakeGpu(
        sm_percent=None, sm_mhz=None, temperature_c=None, power_mw=None, reasons=None, ecc=None
    )
    sampler = NvmlSampler(load=lambda: FakeNvml(gpu))
    sampler.sample(0.0)
    assert set(sampler.sample(1.0)) == {"gpu/0/memory_mhz", "gpu/0/memory_max_mhz"}
    assert sampler.missing == ()


def test_a_driver_that_fails_is_said() -> None:
    sampler = NvmlSampler(load=lambda: FakeNvml(fails="Driver Not Loaded"))
    assert sampler.sample(0.0) == {}
    assert sampler.missing == ("no GPU telemetry: NVML says Driver Not Loaded",)


class _Slow:
    """A sampler that answers when it is let."""

    missing: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.may_answer, self.asked = threading.Event(), threading.Semaphore(0)
        self.error: Exception | None = None

    def sample(self, now_s: float) -> Mapping[str, float]:
        self.asked.release()
        assert self.may_answer.wait(30)
        if self.error is not None:
            raise self.error
        return {"t": now_s}


def _until_idle(background: Background) -> None:
    thread = background._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


def test_a_driver_that_hangs_holds_nobody_up() -> None:
    slow = _Slow()
    background = Background(slow, what="NVML", stale_s=5.0)
    assert background.sample(0.0) == {}
    assert slow.asked.acquire(timeout=10)
    assert background.sample(1.0) == {}
    assert _missing(background) == []
    background.sample(6.0)
    assert _missing(background) == ["NVML does not answer"]
    slow.may_answer.set()
    _until_idle(background)
    assert background.sample(4.0) == {"t": 0.0}
    assert _missing(background) == []
    _until_idle(background)
    assert background.sample(5.0) == {"t": 4.0}
    _until_idle(background)
    assert background.sample(50.0) == {}  # what is old is not given


def _missing(background: Background) -> list[str]:
    return list(background.missing)


def test_a_driver_that_raises_is_left_out() -> None:
    slow = _Slow()
    slow.may_answer.set()
    slow.error = RuntimeError("gone")
    background = Background(slow, what="NVML", stale_s=5.0)
    background.sample(0.0)
    _until_idle(background)
    background.sample(1.0)
    assert background.missing == ("NVML failed: RuntimeError('gone')",)


@pytest.mark.parametrize("interval_s", [1.0, 60.0])
def test_what_is_asked_for_seldom_is_given_all_the_same(
    monkeypatch: pytest.MonkeyPatch, interval_s: float
) -> None:
    """At more than five seconds between samples there were never any numbers of GPUs."""
    monkeypatch.setattr("failslow.telemetry.nvml.import_module", lambda _: FakeNvml(FakeGpu()))
    *_, background = node_samplers(dict, interval_s=interval_s)
    assert isinstance(background, Background)
    assert background.sample(0.0) == {}
    _until_idle(background)
    assert background.sample(interval_s)["gpu/0/sm_mhz"] == 1980.0
