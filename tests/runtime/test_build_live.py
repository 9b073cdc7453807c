"""A first watched job has the compiled capture built and does not wait; the next one uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.watched import WatchedJob, watched
from tests.transport.servers import until

pytest.importorskip("torch", reason="capture needs torch")

from failslow.capture.builder import extension_path, state
from failslow.capture.reader import RingReader


def mode_of(job: WatchedJob) -> str:
    (path,) = (job.folder / "rings").glob("*.ring")
    ring = RingReader(path)
    mode = str(ring.description["mode"])
    ring.close()
    return mode


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_job_builds_it_and_the_next_one_uses_it(tmp_path: Path) -> None:
    built = extension_path()
    if not built.exists():
        pytest.skip("the extension is not built: python -m failslow.capture.native")
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        f"until [ -e {tmp_path}/go ]; do sleep 0.1; done\ncp {built} $2\n"
    )
    compiler.chmod(0o755)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(compiler)}
    log = "the compiled capture is being built in the background for jobs started later"

    with watched(world=1, environ=environ) as job:
        job.until(lambda: len(job.steps()) >= 5)  # while the compiler is at it
        assert mode_of(job) == "dispatcher"
        assert (job.folder / "run" / "runtime.log").read_text().count(log) == 1
        (tmp_path / "go").touch()
        until(extension_path(environ).exists, 120.0)
        job.stop()
        until(lambda: not job.ours(), 30.0)
    assert state(environ).name == "built"

    with watched(world=1, environ=environ) as job:
        job.until(lambda: len(job.steps()) >= 5)
        assert mode_of(job) == "native"
        assert log not in (job.folder / "run" / "runtime.log").read_text()
        job.stop()
        until(lambda: not job.ours(), 30.0)
