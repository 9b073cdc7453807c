"""Settings that all tests share."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A stalled machine is no failure of the property: pytest's own time limit bounds a test.
settings.register_profile("failslow", deadline=None)
settings.load_profile("failslow")

# Workers started by a test bring up no agents, unless the test is about them.
os.environ["FAILSLOW_AGENT"] = "0"

ROOT = Path(__file__).parent
LIVE = {
    "capture": (
        "test_completions.py", "test_install.py", "test_jobs.py", "test_late_profile.py",
    ),
    "inject": (),
    "live": (),
    "localize": (
        "test_benchmarks.py", "test_benchmarks_bed.py", "test_evidence_real.py",
        "test_localize_live.py", "test_pause_live.py", "test_profile_live.py",
    ),
    "probe": ("test_probe_live.py", "test_probe_campaign_real.py"),
    "runtime": (),
    "telemetry": ("test_cpu_sampler.py", "test_telemetry_duty.py"),
    "testbed": (),
    "transport": (),
}  # fmt: skip
"""Folders, and of some the files only, whose tests watch real processes: each leaves the machine
idle half of the time, so two run side by side, but not beside what computes all the time."""

ALONE = {
    "capture": ("test_completions.py", "test_late_profile.py"),
    "inject": ("test_inject_cpu.py", "test_inject_flood.py", "test_inject_throttle.py"),
    "live": ("test_doctor_trial.py",),
    "localize": (
        "test_benchmarks.py", "test_benchmarks_bed.py", "test_evidence_real.py",
        "test_localize_live.py", "test_profile_live.py",
    ),
    "probe": (),
    "runtime": ("test_end_to_end.py", "test_killed.py", "test_priority.py"),
    "telemetry": (),
}  # fmt: skip
"""Of those, the ones in which how fast the processes run decides what is seen."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where `-m` rules a whole file out, it is not even imported: that takes its time too."""
    asked = config.option.markexpr
    if " or " in asked or collection_path.suffix != ".py" or ROOT not in collection_path.parents:
        return None
    marked = _marks(collection_path)
    words = asked.split(" and ")
    unfit = [m for m in ("live", "alone") if (m if m not in marked else f"not {m}") in words]
    return True if unfit else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `LIVE` and `ALONE`."""
    for item in items:
        for mark in _marks(item.path):
            item.add_marker(mark)


def _marks(path: Path) -> list[str]:
    """Of a file's tests."""
    folder, *_ = parts = path.relative_to(ROOT).parts
    if not _is_in(LIVE, folder, parts[-1]):
        return []
    return ["live", "alone"] if _is_in(ALONE, folder, parts[-1]) else ["live"]


def _is_in(chosen: dict[str, tuple[str, ...]], folder: str, name: str) -> bool:
    files = chosen.get(folder)
    return files is not None and (not files or name in files)
