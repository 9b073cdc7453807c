"""The sample logs are what their script writes, and small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_script_writes_the_same_samples_again(examples: Path, tmp_path: Path) -> None:
    script = examples.parents[1] / "scripts" / "make_examples.py"

    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=60)

    kept = {path.name: path.read_bytes() for path in examples.iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    assert sum(map(len, kept.values())) < 60_000
