"""Checks of the machine: room for rings, files, ports, clock, and what hardware can be asked.

In: the environment, the kernel's files. Out: one `Check` a question. Nothing is started.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, util
from pathlib import Path
from typing import Any

from failslow.capture import layout
from failslow.capture.reader import RingReader
from failslow.capture.ring import (
    find_rings,
    ring_bytes,
    ring_capacity,
    ring_folders,
    why_spared,
)
from failslow.errors import FailslowError
from failslow.runtime.doctor.base import Check, Status, nodes_of, read_text
from failslow.runtime.folder import stale_folders

__all__ = ["machine_checks", "stale_rings"]

_SLOW_CLOCK_NS = 1000
_FILES_MIN, _FILES_GOOD = 64, 1024
_USUAL_WORKERS = 8


def machine_checks(environ: Mapping[str, str]) -> Iterator[Check]:
    """ring folder, stale rings, open files, metrics port, clock, nvml, infiniband."""
    yield _ring_folder(environ)
    yield stale_rings(environ)
    yield _files()
    yield _metrics_port(environ)
    yield _clock(environ)
    yield _nvml()
    yield _infiniband()


def _ring_folder(environ: Mapping[str, str]) -> Check:
    try:
        capacity = ring_capacity(environ)
    except FailslowError as error:
        return Check("ring folder", "fail", str(error), "unset FAILSLOW_CAPTURE_RECORDS")
    size = ring_bytes(1 << (capacity - 1).bit_length())
    workers = _local_workers(environ)
    needed = f"{workers} rings with mailboxes, {size / 2**20:.1f} MiB each"
    folders = ring_folders(environ)
    reasons = []
    for place, folder in enumerate(folders):
        reason = _why_not(folder, size * workers) or why_spared(folder, size * workers, environ)
        if reason:
            reasons.append(f"{folder} {reason}")
        elif place == 0:
            return Check("ring folder", "pass", f"{folder} has room for {needed}")
        else:
            return Check(
                "ring folder",
                "warn",
                f"{'; '.join(reasons)}; {folder} has room for {needed}, but a disk is slower",
                f"free space in {folders[0]} (a container's: --shm-size=1g)",
            )
    return Check(
        "ring folder",
        "fail",
        f"no room for {needed}: {'; '.join(reasons)}",
        "free space there, or name another folder in FAILSLOW_CAPTURE_FOLDER",
    )


def _why_not(folder: Path, size: int) -> str:
    """Why `size` bytes of rings cannot be made in `folder`; "" when they can."""
    if not folder.is_dir():
        return "is no folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "is not writable"
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    return f"has {free / 2**20:.1f} MiB left" if free < size else ""


def _local_workers(environ: Mapping[str, str]) -> int:
    text = environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else _USUAL_WORKERS


def stale_rings(environ: Mapping[str, str]) -> Check:
    """Rings that dead workers left behind, and the folders by which they met."""
    dead, size = [], 0
    for path in find_rings(environ=environ):
        try:
            ring = RingReader(path)
        except FailslowError:
            continue  # it ended meanwhile, or is another version's
        # a container that shares the folder numbers its processes by itself
        if not ring.alive and ring.description["pid_namespace"] == _pid_namespace():
            dead.append(path)
            size += ring.capacity * layout.RECORD.size
        ring.close()
    told = []
    if dead:
        told.append(f"{len(dead)} of dead workers, {size / 2**20:.1f} MiB: {_first(dead)}")
    if folders := [folder.path for folder in stale_folders(environ, time.time())]:
        many = "s" if len(folders) > 1 else ""
        told.append(f"{len(folders)} run folder{many} of killed jobs: {_first(folders)}")
    if not told:
        return Check("stale rings", "pass", "none")
    remedy = "nothing: the next watched job removes them"
    return Check("stale rings", "warn", "; ".join(told), remedy)


def _first(paths: Sequence[Path]) -> str:
    return f"{paths[0]}{' …' if len(paths) > 1 else ''}"


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FILES_GOOD:
        shown = "any number of" if soft == resource.RLIM_INFINITY else str(soft)
        return Check("open files", "pass", f"{shown} open files allowed")
    status: Status = "fail" if soft < _FILES_MIN else "warn"
    found = f"{soft} open files allowed: a controller needs one a node, an agent one a worker"
    return Check("open files", status, found, "ulimit -n 65536")


def _metrics_port(environ: Mapping[str, str]) -> Check:
    name, text = "metrics port", environ.get("FAILSLOW_METRICS_PORT", "").strip()
    if not text:
        return Check(name, "info", "FAILSLOW_METRICS_PORT is not set: no /metrics")
    remedy = "set FAILSLOW_METRICS_PORT to a free port, 9464 for one"
    if not text.isdecimal() or int(text) > 65535:
        return Check(name, "fail", f"FAILSLOW_METRICS_PORT={text} is no port", remedy)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(text)))
        except OSError as error:
            found = f"port {text} cannot be had: {error.strerror}; a running job may have it"
            return Check(name, "warn", found, remedy)
    return Check(name, "pass", f"port {text} is free")


def _clock(environ: Mapping[str, str]) -> Check:
    cost_ns = _clock_cost_ns(time.monotonic_ns)
    source = read_text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    found = f"{cost_ns:.0f} ns a reading" + (f", clock source {source}" if source else "")
    if cost_ns > _SLOW_CLOCK_NS:
        remedy = "boot with clocksource=tsc where the hardware allows it"
        return Check("clock", "warn", f"{found}: each collective pays it twice", remedy)
    if (nodes_of(environ) or 1) > 1 and not _is_synchronised():
        found += "; not synchronised, and nodes refuse messages more than 300 s old"
        return Check("clock", "warn", found, "start chronyd or systemd-timesyncd on every node")
    return Check("clock", "pass", found)


def _clock_cost_ns(read: Callable[[], int]) -> float:
    """Of one reading; the best of a few batches, since the machine may be busy."""
    best = math.inf
    for _ in range(5):
        begun = time.perf_counter_ns()
        for _ in range(200):
            read()
        best = min(best, (time.perf_counter_ns() - begun) / 200)
    return best


def _is_synchronised() -> bool:
    """Whether NTP disciplines the kernel's clock; True where that cannot be asked."""
    try:
        # struct timex: zero in its first word asks and changes nothing
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return True
    return bool(state != 5)  # TIME_ERROR


def _nvml() -> Check:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Check("nvml", "info", "no NVIDIA GPU here")
    if util.find_spec("pynvml") is None:
        found = "NVIDIA GPUs whose clocks and temperatures go unseen: pip install nvidia-ml-py"
        return Check("nvml", "info", found)
    pynvml: Any = import_module("pynvml")

    try:
        pynvml.nvmlInit()
        count, driver = pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return Check("nvml", "info", f"NVML does not answer: {error}")
    return Check("nvml", "info", f"{count} GPUs, driver {driver}")


def _infiniband() -> Check:
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    active = sum("ACTIVE" in read_text(str(port)) for port in ports)
    found = f"{len(ports)} ports, {active} active" if ports else "no InfiniBand or RoCE device here"
    return Check("infiniband", "info", found)
