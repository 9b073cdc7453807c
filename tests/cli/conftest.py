"""The command as users have it: run in this process, and as one of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest
from typer.testing import CliRunner, Result

from failslow.cli import app

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "logs"


class Run(Protocol):
    """`run("analyze", path)`: the result of the command in this process."""

    def __call__(self, *args: str | Path, stdin: bytes | None = None) -> Result: ...


class Spawn(Protocol):
    """`spawn("analyze", path)`: the finished process of the command."""

    def __call__(
        self, *args: str | Path, stdin: bytes = b"", cwd: Path | None = None, limit_s: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]: ...


@pytest.fixture
def run() -> Run:
    """Runs the app by typer's runner."""

    def call(*args: str | Path, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(a) for a in args], input=stdin)

    return call


@pytest.fixture(scope="session")
def command() -> Sequence[str]:
    """The installed command, as a list for subprocess."""
    script = Path(sys.executable).with_name("failslow")
    return [str(script)]


@pytest.fixture
def spawn(command: Sequence[str]) -> Spawn:
    """Runs the installed command."""

    def call(
        *args: str | Path, stdin: bytes = b"", cwd: Path | None = None, limit_s: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*command, *(str(a) for a in args)],
            input=stdin,
            capture_output=True,
            timeout=limit_s,
            check=False,
            cwd=cwd,
        )

    return call


@pytest.fixture(scope="session")
def examples() -> Path:
    """The folder of sample logs."""
    return EXAMPLES
