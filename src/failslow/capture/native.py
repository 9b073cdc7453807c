"""The native capture: loads the extension made from `native.cpp`, and is its Python side.

In: what `builder` built, once for each torch. Out: the extension that `hook` prefers when it is
there; a training process never compiles. Without it everything works, at some ten times the
cost a call.

    python -m failslow.capture.native      ->  /root/.cache/failslow/native-…/failslow_native.so
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from failslow.capture import builder, layout
from failslow.capture.cache import opened
from failslow.capture.ops import Op
from failslow.capture.recorder import Recorder
from failslow.capture.ring import RingWriter
from failslow.errors import CaptureError
from failslow.mailbox import OFFSET_ATTENTION, Mailbox

__all__ = ["NativeRecorder", "load"]

_NAME = "failslow_native"


def load(environ: Mapping[str, str] = os.environ) -> Any:
    """The extension module, or None where it was not built.

    One that is damaged, cannot be loaded, or could have been put there by another user, is refused
    with CaptureError.
    """
    reasons: list[CaptureError] = []
    for path in builder.places(environ):
        with contextlib.suppress(OSError):  # it is not there
            try:
                with opened(path) as handle:
                    return _import(path, handle)
            except CaptureError as error:
                reasons.append(error)
    if reasons:
        raise reasons[0]
    return None


def _import(path: Path, handle: int) -> Any:
    """The module, out of the very file that is open."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, f"/proc/self/fd/{handle}")
    spec = importlib.util.spec_from_loader(_NAME, loader)
    if spec is None:
        raise ImportError(f"{path} is no extension")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        why = " ".join(str(error).split())
        raise CaptureError(f"{path} cannot be loaded ({why}); run {builder.COMMAND}") from None
    module.__file__ = str(path)
    return module


class NativeRecorder(Recorder):
    """A recorder whose calls and waits the extension writes; Python adds groups and steps."""

    def __init__(self, extension: Any, **more: Any) -> None:
        super().__init__(mode="native", **more)
        self.extension = extension

    def install(self, ops: Mapping[str, tuple[Any, Op]]) -> None:
        """Register the native kernels."""
        self.extension.install(
            self,
            [
                (
                    op.name,
                    (
                        op.code,
                        op.group,
                        op.message,
                        -1 if op.peer is None else op.peer,
                        -1 if op.blocking is None else op.blocking,
                        op.returns,
                        op.listed,
                        op.sized,
                        op.times_group,
                        op.name not in layout.POINT_TO_POINT,
                    ),
                )
                for _, op in ops.values()
            ],
        )

    def opened(self, ring: RingWriter) -> None:
        """Hand the ring's memory to the extension."""
        self.extension.open(
            ring.memory,
            ring.offset,
            ring.capacity,
            layout.OFFSET_HEAD,
            layout.OFFSET_CONTROL,
            layout.OFFSET_FAULTS,
            layout.OFFSET_COUNTS,
            layout.COUNTED_GROUPS,
            ring.world_size,
        )
        super().opened(ring)
        self.append = self.extension.append

    def reachable(self, mailbox: Mailbox) -> None:
        """The extension looks at the attention word from now on."""
        super().reachable(mailbox)
        self.extension.hear(mailbox.memory, OFFSET_ATTENTION)

    def refuse(self, reason: str) -> None:
        """As the base; the extension passes calls through from then on."""
        self.extension.stop()
        super().refuse(reason)

    def flush(self, state: Any) -> None:
        """The thread's unwritten call is the extension's."""
        del state
        self.extension.flush()

    def follow_on_device(self, noted: tuple[int, int, int, int], work: Any, begun: Any) -> None:
        """Profiling on a GPU: report when the call is complete."""
        self._completions.follow(noted, work, begun, on_cpu=False, polls=False)

    def set_busy(self, busy: bool) -> None:
        """This thread's calls are ours, or no longer."""
        super().set_busy(busy)
        self.extension.set_busy(busy)

    def stop(self, reason: str) -> None:
        """As the base; calls pass through from then on."""
        super().stop(reason)
        self.extension.stop()

    def forked(self) -> None:
        """As the base; the extension forgets the parent's ring."""
        super().forked()
        self.extension.forget()


def _try() -> None:
    """One collective of one rank, captured; for a build before it is put in place."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from failslow.capture import hook

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    hook.install("native")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    now = hook.status()
    hook.uninstall()
    if now["records"] != 1 or now["faults"] or tensor.tolist() != [1.0, 1.0]:
        sys.exit(f"error: the extension does not capture: {now}")
    sys.stderr.flush()
    os._exit(0)  # gloo may abort an ordinary exit


def _main(option: str) -> None:
    if option == "--try":
        _try()
        return
    later = option == "--later"
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if later and nice > 0:  # beside a training job, in a session of its own
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(nice))
    try:
        path = builder.build(wait=not later, again=not later)
    except CaptureError as error:
        sys.exit(f"failslow build: {error}" if later else str(error))
    print(f"failslow build: the compiled capture is ready: {path}" if later else path, flush=True)


if __name__ == "__main__":
    _main("".join(sys.argv[1:2]))
