"""What undoes an injection, as data: written down before the fault, carried out after it.

In: steps recorded by `failslow.inject.guard`. Out: the machine as it was. Each step may be carried
out twice, or find its object gone, and does then nothing. On disk a step is one object:

    {"do": "EndProcess", "process": {"pid": 4711, "start_ticks": 183203}}
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from failslow.errors import InjectError
from failslow.inject.cgroups import dissolve
from failslow.inject.processes import ProcessId, end_process, send_signal
from failslow.inject.shaping import Shape, remove_shape

__all__ = [
    "DissolveGroup",
    "EndProcess",
    "HandBack",
    "RemoveShape",
    "RestoreFile",
    "Resume",
    "Step",
    "step_from_json",
    "step_to_json",
]


@dataclass(frozen=True)
class RestoreFile:
    """Write the old text back into a kernel file."""

    path: str
    text: str

    def undo(self) -> None:
        """Raises InjectError where the file is there and refuses."""
        if Path(self.path).exists():
            with suppress(FileNotFoundError):
                Path(self.path).write_text(self.text, encoding="ascii")


@dataclass(frozen=True)
class HandBack:
    """Keep the cpu controller from the groups below one, as before (control groups, version 2).

    Unless one of them has a limit: that would be gone with it. Whoever set it promised this too.
    """

    path: str
    """Of the group."""

    def undo(self) -> None:
        """Raises OSError where the kernel refuses."""
        for limit in Path(self.path).glob("*/cpu.max"):
            with suppress(OSError):
                if limit.read_text(encoding="ascii").split()[0] != "max":
                    return
        try:
            Path(self.path, "cgroup.subtree_control").write_text("-cpu", encoding="ascii")
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY:  # a group below hands it down in turn
                raise


@dataclass(frozen=True)
class DissolveGroup:
    """Move the members of a control group back and remove it."""

    path: str
    back_to: str

    def undo(self) -> None:
        """Raises InjectError where it stays busy."""
        dissolve(Path(self.path), Path(self.back_to))


@dataclass(frozen=True)
class RemoveShape:
    """Take a rate limit from an interface."""

    shape: Shape

    def undo(self) -> None:
        """Raises InjectError where tc refuses."""
        remove_shape(self.shape)


@dataclass(frozen=True)
class EndProcess:
    """Kill a process of ours."""

    process: ProcessId

    def undo(self) -> None:
        """Raises InjectError where it outlives SIGKILL."""
        end_process(self.process)


@dataclass(frozen=True)
class Resume:
    """Let a stopped process run."""

    process: ProcessId

    def undo(self) -> None:
        """A process that has ended needs nothing."""
        send_signal(self.process, signal.SIGCONT)


Step = RestoreFile | HandBack | DissolveGroup | RemoveShape | EndProcess | Resume
_READ: Mapping[str, Callable[[Mapping[str, Any]], Step]] = {
    "RestoreFile": lambda d: RestoreFile(d["path"], d["text"]),
    "HandBack": lambda d: HandBack(d["path"]),
    "DissolveGroup": lambda d: DissolveGroup(d["path"], d["back_to"]),
    "RemoveShape": lambda d: RemoveShape(Shape(**d["shape"])),
    "EndProcess": lambda d: EndProcess(ProcessId(**d["process"])),
    "Resume": lambda d: Resume(ProcessId(**d["process"])),
}


def step_to_json(step: Step) -> dict[str, Any]:
    """The step as it is written down."""
    return {"do": type(step).__name__, **asdict(step)}


def step_from_json(data: Mapping[str, Any]) -> Step:
    """The step that was written down. Raises InjectError where it is none of ours."""
    try:
        return _READ[data["do"]](data)
    except (KeyError, TypeError):
        raise InjectError(
            f"unknown undo step {dict(data)!r}; written by another version?"
        ) from None
