"""The native capture: finds, builds and loads the extension made from `native.cpp`.

In: torch's headers and a C++ compiler, once. Out: an extension in the user's cache folder, one
for each torch and Python, that `hook` prefers when it is there; a training process never
compiles. Without it everything works, at some ten times the cost a call.

    python -m failslow.capture.native      ->  /root/.cache/failslow/native-…/failslow_native.so
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from failslow.capture import layout
from failslow.capture.ops import Op
from failslow.capture.recorder import Recorder
from failslow.capture.ring import RingWriter
from failslow.errors import CaptureError
from failslow.mailbox import OFFSET_ATTENTION, Mailbox

__all__ = ["NativeRecorder", "build", "extension_path", "load"]

SOURCE = Path(__file__).with_name("native.cpp")
_HEADER = Path(__file__).with_name("native_ring.hpp")
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-w")


def extension_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the extension for this source, torch and Python is, or would be."""
    import torch

    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    what = (
        SOURCE.read_bytes(),
        torch.__version__,
        sys.version,
        platform.machine(),
        torch.__file__,
        *_FLAGS,
    )
    key = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return Path(cache) / "failslow" / f"native-{key}" / "failslow_native.so"


def build(environ: Mapping[str, str] = os.environ) -> Path:
    """Compile the extension unless it is there; takes about half a minute.

    Raises CaptureError with what the compiler said.
    """
    import torch

    path = extension_path(environ)
    if path.exists():
        return path
    home = Path(torch.__file__).parent
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            environ.get("CXX", "c++"),
            *_FLAGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            f"-I{home / 'include'}",
            f"-I{home / 'include/torch/csrc/api/include'}",
            f"-I{sysconfig.get_paths()['include']}",
            str(SOURCE),
            *("-o", str(made), f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise CaptureError(
                f"no C++ compiler: {command[0]} was not found; install one or set CXX"
            ) from None
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if "error" in line]
            raise CaptureError(
                f"{SOURCE.name} does not compile against torch {torch.__version__}: "
                f"{lines[0] if lines else error.stderr[-300:]}; capture works without it"
            ) from None
        os.replace(made, path)
    return path


def load(environ: Mapping[str, str] = os.environ) -> Any:
    """The extension module, or None where it was not built.

    A file another user could have put there is refused with CaptureError.
    """
    path = extension_path(environ)
    try:
        about = path.stat()
    except OSError:
        return None
    if about.st_uid not in (os.getuid(), 0) or about.st_mode & 0o022:
        raise CaptureError(f"{path} can be written by others; remove it")
    spec = importlib.util.spec_from_file_location("failslow_native", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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

    def begin_on_device(self) -> Any:
        """Profiling on a GPU: before a call."""
        return self._completions.begin(on_cpu=False)

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


if __name__ == "__main__":
    try:
        print(build())
    except CaptureError as error:
        sys.exit(str(error))
