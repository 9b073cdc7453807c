"""What telemetry of GPUs tells of one of them, and what it does not."""

from __future__ import annotations

import pytest
from tests.localize.test_evidence import HEALTHY
from tests.localize.test_evidence import _device as device
from tests.localize.test_evidence import _explain as explained
from tests.localize.test_evidence import _saying as saying
from tests.localize.windows_of import ONSET_T, node, step

from failslow.localize.evidence import explain_all
from failslow.steering import Finding


@pytest.mark.parametrize("reason", ["power", "thermal", "hardware"])
def test_what_holds_every_gpu_alike_is_not_what_makes_one_of_them_slow(reason: str) -> None:
    """Under full load GPUs run at their power limit, healthy ones too."""
    series: dict[str, list[float | None] | float] = {
        f"gpu/{gpu}/throttle_{reason}": 0.95 for gpu in range(8)
    }
    body = node(
        "n1",
        series=series,
        ranks=dict.fromkeys(range(8), HEALTHY),
        gpus={i: [i] for i in range(8)},
    )
    told = explained(device(device="NVIDIA H200"), body)
    assert told.cause == "device degradation"
    assert saying(told, "Against device degradation: ")

    series |= {f"gpu/{gpu}/throttle_{reason}": 0.0 for gpu in range(8) if gpu != 3}
    alone = node("n1", series=series, ranks={3: HEALTHY}, gpus={i: [i] for i in range(8)})
    told = explained(device(device="NVIDIA H200"), alone)
    assert told.cause.startswith("device degradation (" if reason != "hardware" else "device")
    assert saying(told, "For device degradation: ")


def test_one_gpu_alone_at_its_power_limit_is_at_work() -> None:
    body = node("n1", series={"gpu/0/throttle_power": 1.0}, ranks={3: HEALTHY}, gpus={0: [3]})
    assert explained(device(device="NVIDIA H200"), body).cause == "device degradation"


def test_a_gpu_jobs_host_is_no_device_where_nvml_is_not_there() -> None:
    held = {**HEALTHY, "throttled_cores": step(0.0, 0.4)}
    host = Finding(what="host", slowdown=1.5, ranks=(0, 1), host="n1")
    (told,) = explain_all(
        [host],
        [node("n1", ranks={0: held, 1: held})],
        onset_t=ONSET_T,
        devices={0: "NVIDIA H200", 1: "NVIDIA H200"},
    )
    assert (told.what, told.ranks, told.cause) == ("host", (0, 1), "CPU contention")
