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
"""Folders, and of some the files only, whose tests watch real processes: how fast these run
decides what is seen, so they are run one at a time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `LIVE`."""
    for item in items:
        folder, *_ = path = item.path.relative_to(ROOT).parts
        files = LIVE.get(folder)
        if files is not None and (not files or path[-1] in files):
            item.add_marker("live")
