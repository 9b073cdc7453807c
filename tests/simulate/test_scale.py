"""All of localisation and planning on one simulated job after the other, as benchmarks/scale.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import scale


@pytest.mark.parametrize(
    "devices", [64, pytest.param(1024, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_every_kind_of_fault_is_found_named_and_planned_for(devices: int, tmp_path: Path) -> None:
    row = scale.measure(devices, 800)

    assert (row["found"], row["false"]) == ("3/3", 0)
    assert (row["right"], row["innocents"]) == ("5/5", 0)
    left, promised = map(float, row["left"].split("/"))
    assert left < promised + 0.05
    page = tmp_path / "scale.html"
    scale.draw([row, {**row, "devices": 2 * devices}], page)
    assert "controller, an iteration" in page.read_text(encoding="utf-8")
