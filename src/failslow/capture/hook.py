"""Installs the capture of this process, once, and says how it is captured.

In: a call of `install` (by `autoload`). Out: kernels at dispatch key BackendSelect for every
c10d collective, above every device's own: they see DDP's C++ reducer, FSDP2, DeviceMesh,
pipelining, functional and compiled collectives. (A kernel at the device's key that calls the
next one boxed would hold the interpreter's lock and can hang a job.) `Work.wait` is timed, and
torch's global post-step hook marks optimizer steps. Where torch's dispatcher lacks what this
needs, the methods of ProcessGroup are wrapped instead.

    status() -> {"mode": "dispatcher", "active": True, "ring": "/dev/shm/failslow-…", …}
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from failslow.capture.completion import DeviceClock
from failslow.capture.kernels import make_kernel, make_wait
from failslow.capture.methods import METHODS, UNSEEN, make_method
from failslow.capture.ops import dispatcher_ops
from failslow.capture.recorder import Recorder
from failslow.errors import CaptureError

__all__ = ["install", "mark_step", "quiet", "status", "uninstall"]


class _Installed:
    """The one hook of the process and what it takes to remove it."""

    recorder: Recorder | None = None
    missed: tuple[str, ...] = ()
    undo: ExitStack = ExitStack()
    pid = 0
    fork_watched = False


def install(mode: str = "", device: DeviceClock | None = None) -> Recorder:
    """Hook this process; a second call changes nothing. The ring is made at the first call.

    mode: "dispatcher" or "python"; default $FAILSLOW_CAPTURE_MODE, else whichever this torch
    allows. device: stands in for CUDA events in tests. Raises what torch raises when its parts
    are missing, and CaptureError for an unknown mode: nothing is left installed.
    """
    if _Installed.recorder is not None:
        return _Installed.recorder
    mode = mode or os.environ.get("FAILSLOW_CAPTURE_MODE", "") or _best_mode()
    if mode not in ("dispatcher", "python"):
        raise CaptureError(
            f"FAILSLOW_CAPTURE_MODE = {mode!r} must be dispatcher or python; unset it to let "
            "failslow choose"
        )
    recorder = Recorder(mode=mode, description={"torch": torch.__version__}, device=device)
    with ExitStack() as stack:  # half an installation is undone
        attach = _attach_dispatcher if mode == "dispatcher" else _attach_methods
        missed = attach(recorder, stack)
        _replace(stack, dist.Work, "wait", make_wait(recorder, dist.Work.wait))
        stack.callback(register_optimizer_step_post_hook(_step(recorder)).remove)
        _Installed.undo = stack.pop_all()
    _Installed.recorder, _Installed.missed, _Installed.pid = recorder, tuple(missed), os.getpid()
    if not _Installed.fork_watched:
        os.register_at_fork(after_in_child=_forked)
        _Installed.fork_watched = True
    atexit.register(uninstall)
    return recorder


def uninstall() -> None:
    """Remove the hook, write what is unwritten, close the ring. In a forked child: nothing."""
    if _Installed.pid != os.getpid():
        return  # the dispatcher's lock may be held by a thread that the fork did not copy
    recorder, _Installed.recorder = _Installed.recorder, None
    if recorder is not None:
        atexit.unregister(uninstall)
        recorder.stop("uninstalled")
        _Installed.undo.close()


def _forked() -> None:
    if _Installed.recorder is not None:
        _Installed.recorder.forked()


def mark_step(index: int) -> None:
    """The trainer says that iteration `index` ended; nothing happens when it is not watched."""
    if _Installed.recorder is not None:
        _Installed.recorder.mark_step(index)


class quiet:
    """Within it this thread's collectives are failslow's own and are not recorded."""

    def __enter__(self) -> None:
        if _Installed.recorder is not None:
            _Installed.recorder.local.state.busy = True

    def __exit__(self, *_: object) -> None:
        if _Installed.recorder is not None:
            _Installed.recorder.local.state.busy = False


def status() -> dict[str, Any]:
    """{mode, active, reason, ring, records, faults, missed} of this process.

    mode: "dispatcher" (every collective), "python" (only those called from Python), "off".
    missed: what is not seen in this mode, or not known to this version.
    """
    recorder = _Installed.recorder
    if recorder is None:
        return {
            "mode": "off",
            "active": False,
            "reason": "not installed",
            "ring": None,
            "records": 0,
            "faults": {},
            "missed": [],
        }
    ring = recorder.ring
    return {
        "mode": recorder.mode,
        "active": recorder.on,
        "reason": recorder.reason,
        "ring": None if ring is None else str(ring.path),
        "records": 0 if ring is None else ring.written,
        "faults": dict(recorder.faults),
        "missed": list(_Installed.missed),
    }


def _best_mode() -> str:
    needed = (
        (torch._C, "_dispatch_keyset_full_after"),
        (torch._C, "_dispatch_get_all_op_names"),
        (dist.ProcessGroup, "unbox"),
        (dist.Work, "unbox"),
    )
    return "dispatcher" if all(hasattr(*part) for part in needed) else "python"


def _attach_dispatcher(recorder: Recorder, stack: ExitStack) -> list[str]:
    """Register the kernels; returns the collectives that cannot be read."""
    ops, missed = dispatcher_ops()
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch's
    stack.callback(library._destroy)
    for overload, op in ops.values():
        kernel = make_kernel(recorder, overload, op)
        library.impl(op.name, kernel, "BackendSelect", with_keyset=True)
    return missed


def _attach_methods(recorder: Recorder, stack: ExitStack) -> list[str]:
    """Wrap ProcessGroup's methods; returns what is not seen that way."""
    group, seen = dist.ProcessGroup, set()
    for name, (op, _, _) in METHODS.items():
        if hasattr(group, name):
            _replace(stack, group, name, make_method(recorder, name, getattr(group, name)))
            seen.add(op)
    return [*UNSEEN, *sorted({op for op, _, _ in METHODS.values()} - seen)]


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _step(recorder: Recorder) -> Callable[[Any, Any, Any], None]:
    def step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():  # traced, it would break a full graph
            recorder.step(optimizer, args, kwargs)

    return step
