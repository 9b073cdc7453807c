"""Installs the capture of this process, once, and says how it is captured.

In: a call of `install` (by `autoload`). Out: kernels at dispatch key BackendSelect for every
c10d collective, above every device's own: they see DDP's C++ reducer, FSDP2, DeviceMesh,
pipelining, functional and compiled collectives. (A kernel at the device's key that calls the
next one boxed would hold the interpreter's lock and can hang a job.) `Work.wait` is timed, and
torch's global post-step hook marks optimizer steps. The kernels are those of the extension
where that was built, else Python's; where torch's dispatcher lacks what they need, the methods
of ProcessGroup are wrapped.

    status() -> {"mode": "dispatcher", "active": True, "ring": "/dev/shm/failslow-…", …}
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from failslow.capture import native
from failslow.capture.completion import DeviceClock
from failslow.capture.kernels import make_kernel, make_wait
from failslow.capture.methods import METHODS, UNSEEN, make_method
from failslow.capture.ops import dispatcher_ops
from failslow.capture.recorder import Recorder
from failslow.errors import CaptureError
from failslow.mailbox import Mailbox

__all__ = [
    "MODES",
    "begin_steps",
    "install",
    "mailbox",
    "mark_step",
    "now_and_then",
    "quiet",
    "status",
    "uninstall",
]


MODES = ("native", "dispatcher", "python")
"""Ways to be captured, best first: the compiled kernels; the same in Python; ProcessGroup's
methods, where torch's dispatcher cannot be used."""


class _Installed:
    """The one hook of the process and what it takes to remove it."""

    recorder: Recorder | None = None
    missed: tuple[str, ...] = ()
    refused = ""
    undo: ExitStack = ExitStack()
    pid = 0
    fork_watched = False
    chore: Callable[[], object] | None = None
    every_s = due_s = 0.0


def install(
    mode: str = "", device: DeviceClock | None = None, environ: Mapping[str, str] = os.environ
) -> Recorder:
    """Hook this process; a second call changes nothing. The ring is made at the first call.

    mode: one of `MODES`; default $FAILSLOW_CAPTURE_MODE, else the best there is. device: stands
    in for CUDA events in tests. environ: what tells job and rank. Raises what torch raises when
    its parts are missing, and CaptureError for a mode that cannot be had: nothing is left
    installed.
    """
    if _Installed.recorder is not None:
        return _Installed.recorder
    mode = mode or environ.get("FAILSLOW_CAPTURE_MODE", "")
    if mode not in ("", *MODES):
        raise CaptureError(
            f"FAILSLOW_CAPTURE_MODE = {mode!r} must be one of {', '.join(MODES)}; unset it to "
            "let failslow choose"
        )
    extension, _Installed.refused = _extension(mode)
    if not mode:
        mode = "native" if extension else "dispatcher" if _can_redispatch() else "python"
    with ExitStack() as stack:  # half an installation is undone
        recorder, missed = _attach(mode, extension, stack, device=device, environ=environ)
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


def mark_step(index: int, work: int = 0) -> None:
    """The trainer says that iteration `index` ended; nothing happens when it is not watched.

    work: tokens or samples in it; 0 not told.
    """
    if _Installed.recorder is not None:
        _Installed.recorder.mark_step(index, work)
        _do_chore()


def begin_steps(index: int) -> None:
    """The trainer is about to begin with iteration `index`; as `mark_step` otherwise."""
    if _Installed.recorder is not None:
        _Installed.recorder.begin_steps(index)


def now_and_then(chore: Callable[[], object], every_s: float) -> None:
    """Call `chore` every so many seconds, at the next step's end: where a little time is no loss.

    Its exceptions count as faults of ours. There is one; a second call replaces it.
    """
    _Installed.chore, _Installed.every_s = chore, every_s
    _Installed.due_s = time.monotonic() + every_s


def _do_chore() -> None:
    if _Installed.chore is None or time.monotonic() < _Installed.due_s:
        return
    _Installed.due_s = time.monotonic() + _Installed.every_s
    recorder = _Installed.recorder
    if recorder is None or _Installed.pid != os.getpid():
        return
    try:
        _Installed.chore()
    except Exception as error:
        recorder.fault(error)


def mailbox() -> Mailbox | None:
    """The way to the node's agent; None when this process is not watched, or has made no call."""
    return None if _Installed.recorder is None else _Installed.recorder.mailbox


class quiet:
    """Within it this thread's collectives are failslow's own and are not recorded."""

    def __enter__(self) -> None:
        if _Installed.recorder is not None:
            _Installed.recorder.set_busy(True)

    def __exit__(self, *_: object) -> None:
        if _Installed.recorder is not None:
            _Installed.recorder.set_busy(False)


def status() -> dict[str, Any]:
    """{mode, active, reason, ring, records, faults, missed, refused} of this process.

    mode: "native" or "dispatcher" (every collective), "python" (only those called from Python),
    "off".
    missed: what is not seen in this mode, or not known to this version.
    refused: why the compiled capture that is there is not used.
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
            "refused": "",
        }
    ring, faults = recorder.ring, dict(recorder.faults)
    if ring is not None and ring.faults > sum(faults.values()):
        faults["in the extension"] = ring.faults - sum(faults.values())
    return {
        "mode": recorder.mode,
        "active": recorder.on,
        "reason": recorder.reason,
        "ring": None if ring is None else str(ring.path),
        "records": 0 if ring is None else ring.written,
        "faults": faults,
        "missed": list(_Installed.missed),
        "refused": _Installed.refused,
    }


def _can_redispatch() -> bool:
    needed = (
        (torch._C, "_dispatch_keyset_full_after"),
        (torch._C, "_dispatch_get_all_op_names"),
        (dist.ProcessGroup, "unbox"),
        (dist.Work, "unbox"),
    )
    return all(hasattr(*part) for part in needed)


def _extension(mode: str) -> tuple[Any, str]:
    """The native extension if it is wanted, or why one that is there is refused; that counts only
    when it was asked for, as does that none was built."""
    if mode not in ("", "native"):
        return None, ""
    try:
        extension = native.load()
    except CaptureError as error:
        if mode == "native":
            raise
        return None, str(error)  # any other mode is better than none
    if extension is None and mode == "native":
        raise CaptureError(
            "FAILSLOW_CAPTURE_MODE = 'native', but the extension is not built; run "
            "python -m failslow.capture.native"
        )
    return extension, ""


def _attach(mode: str, extension: Any, stack: ExitStack, **more: Any) -> tuple[Recorder, list[str]]:
    """The recorder, attached to torch, and what it will not see."""
    more["description"] = {"torch": torch.__version__}
    if mode == "native":
        ops, missed = dispatcher_ops()
        recorder = native.NativeRecorder(extension, **more)
        stack.callback(extension.uninstall)
        recorder.install(ops)
        _replace(stack, dist.Work, "wait", extension.timed(dist.Work.wait))
        return recorder, missed
    plain = Recorder(mode=mode, **more)
    missed = (_attach_dispatcher if mode == "dispatcher" else _attach_methods)(plain, stack)
    _replace(stack, dist.Work, "wait", make_wait(plain, dist.Work.wait))
    return plain, missed


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
        if name in vars(group):
            _replace(stack, group, name, make_method(recorder, name, getattr(group, name)))
            seen.add(op)
    return [*UNSEEN, *sorted({op for op, _, _ in METHODS.values()} - seen)]


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    # as it lies in the class: what an attribute look-up gives does not bind when set again
    stack.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def _step(recorder: Recorder) -> Callable[[Any, Any, Any], None]:
    def step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():  # traced, it would break a full graph
            recorder.step(optimizer, args, kwargs)
            _do_chore()

    return step
