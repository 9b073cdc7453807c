"""The writing end of a ring: a fixed-size file that a training process fills and never blocks on.

In: the values of one record at a time. Out: a file in `/dev/shm` (where that has little room, in
the temporary folder), laid out as `failslow.capture.layout` says, mode 0600. Standard library only.

    writer = RingWriter.create(job="pretrain7", rank=3, world_size=8, description={})
    writer.append(start_ns, end_ns, wait_ns, size_bytes, call_ns, thread, peer, group_size,
                  op, CALL, dtype, flags, group)

One process writes. Its threads may all append: numbers are handed out by one C call, and a
record is written by one C call, both under the interpreter's lock. Nothing waits for the reader;
the oldest records are overwritten, and the reader counts what it lost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import re
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from failslow.capture import layout
from failslow.capture.origin import Origin, process_start_ticks
from failslow.errors import CaptureError
from failslow.mailbox import MAILBOX_BYTES, mail_path

__all__ = [
    "DEFAULT_CAPACITY",
    "MAX_CAPACITY",
    "Append",
    "RingWriter",
    "find_rings",
    "job_name",
    "process_start_ticks",
    "read_about",
    "remove_stale",
    "ring_bytes",
    "ring_capacity",
    "ring_folders",
    "why_spared",
]

DEFAULT_CAPACITY = 1 << 16
"""Records a ring holds: 4 MiB, 13 s of a job that makes 5,000 calls a second."""
MAX_CAPACITY = 1 << 22
GROUPS_CAPACITY = 256 * 1024
_SHM = Path("/dev/shm")
_LONGEST = 200
"""Characters kept of a variable of the environment."""
_LONGEST_NAME = 80
_SPARED = 10
"""Rings take at most this part of what is free there."""
Append = Callable[
    [int, int, int, int, int, int, int, int, int, int, int, int, int],
    int,
]
"""start_ns, end_ns, wait_ns, size_bytes, call_ns, thread, peer, group_size, op, kind, dtype,
flags, group -> seq."""
_NAME = re.compile(r"failslow-(?P<uid>\d+)-(?P<job>.+)-r(?P<rank>\d+)-p(?P<pid>\d+)\.(?:ring|tmp)")


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """FAILSLOW_JOB, else the elastic run's id, else the rendezvous address; safe in a file name.

    Workers of one job agree on it without talking. Jobs of one name are told apart by `Origin`.
    """
    name = environ.get("FAILSLOW_JOB") or environ.get("TORCHELASTIC_RUN_ID") or ""
    if name in ("", "none"):  # torchrun's own default run id is "none"
        name = f"{environ.get('MASTER_ADDR', 'local')}-{environ.get('MASTER_PORT', '0')}"
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
    if len(safe) <= _LONGEST_NAME:
        return safe
    # names that long often differ at their end alone
    rest = f"-{zlib.crc32(name.encode(errors='surrogateescape')):08x}"
    return safe[: _LONGEST_NAME - len(rest)] + rest


def ring_folders(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Where rings are made, best first: FAILSLOW_CAPTURE_FOLDER, else /dev/shm, else temp."""
    if environ.get("FAILSLOW_CAPTURE_FOLDER"):
        return (Path(environ["FAILSLOW_CAPTURE_FOLDER"]),)
    return (_SHM, Path(tempfile.gettempdir()))


def why_spared(folder: Path, size: int, environ: Mapping[str, str] = os.environ) -> str:
    """Why `size` bytes of rings are too much for /dev/shm; "" where they may be made in `folder`.

    A container often has 64 MiB of it: data loaders and NCCL, which end without room there, need
    it more than we do. A folder that was named is taken at its word.
    """
    if folder != _SHM or environ.get("FAILSLOW_CAPTURE_FOLDER"):
        return ""
    try:
        space = os.statvfs(folder)
    except OSError:
        return ""  # whoever makes a file there will be told
    free = space.f_bavail * space.f_frsize
    if size * _SPARED <= free or not space.f_blocks:  # a tmpfs without a limit has no blocks
        return ""
    return (
        f"has {free / 2**20:.1f} MiB left, and {size / 2**20:.1f} MiB of rings are more than a "
        "tenth of it"
    )


def ring_bytes(capacity: int) -> int:
    """What a worker takes for a ring of `capacity` records and its mailbox."""
    return layout.GROUPS_OFFSET + GROUPS_CAPACITY + capacity * layout.RECORD.size + MAILBOX_BYTES


def ring_capacity(environ: Mapping[str, str] = os.environ) -> int:
    """Records a ring shall hold: FAILSLOW_CAPTURE_RECORDS, else 65,536; CaptureError if bad."""
    text = environ.get("FAILSLOW_CAPTURE_RECORDS", str(DEFAULT_CAPACITY))
    if not text.isdecimal() or not 2 <= int(text) <= MAX_CAPACITY:
        raise CaptureError(
            f"FAILSLOW_CAPTURE_RECORDS = {text!r} must be a number of records from 2 to "
            f"{MAX_CAPACITY} ({MAX_CAPACITY * layout.RECORD.size >> 20} MiB); the default is "
            f"{DEFAULT_CAPACITY}"
        )
    return int(text)


def find_rings(job: str | None = None, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """This user's rings (of `job`, or all), ordered by name."""
    return sorted(
        path
        for path, match in _candidates(environ)
        if path.suffix == ".ring" and (job is None or match["job"] == job)
    )


def remove_stale(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Remove this user's rings whose process is gone; returns them.

    A ring made in another pid namespace (a container sharing /dev/shm) or before a reboot is
    judged by what it says of itself: foreign namespaces are left alone, older boots removed.
    """
    removed = []
    for path, match in _candidates(environ):
        # removed by its owner or by another cleaner meanwhile: not ours to complain about
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            if not _alive(file.read(layout.GROUPS_OFFSET), int(match["pid"])):
                mail_path(path).unlink(missing_ok=True)
                path.unlink()
                removed.append(path)
    return removed


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[Path, re.Match[str]]]:
    uid = str(os.getuid())
    for folder in ring_folders(environ):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if (
                    match
                    and match["uid"] == uid
                    and entry.is_file(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid == os.getuid()
                ):
                    yield Path(entry.path), match


def _alive(head: bytes, pid: int) -> bool:
    if head[:8] != layout.MAGIC:  # unfinished: its maker is at it, or died at it
        return process_start_ticks(pid) is not None
    about = _about(head)
    if about["boot_id"] != _boot_id():
        return False
    if about["pid_namespace"] != _pid_namespace():
        return True
    return bool(process_start_ticks(pid) == about["pid_start_ticks"])


def read_about(path: Path) -> dict[str, Any]:
    """What a ring says of its worker, without mapping it; nothing where that cannot be read."""
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        head = file.read(layout.GROUPS_OFFSET)
        if head[:8] == layout.MAGIC and len(head) == layout.GROUPS_OFFSET:
            return _about(head)
    return {}


def _about(head: bytes) -> dict[str, Any]:
    size = layout.HEADER.unpack_from(head)[6]
    start = layout.DESCRIPTION_OFFSET
    about: dict[str, Any] = json.loads(head[start : start + size])
    return about


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class RingWriter:
    """One worker's ring, open for writing. Make it with `create`."""

    def __init__(self, path: Path, memory: mmap.mmap, capacity: int, ring_offset: int) -> None:
        self.path = path
        self.capacity = capacity
        self.memory = memory
        self.offset = ring_offset
        self.pid = os.getpid()
        self.world_size: int = layout.HEADER.unpack_from(memory)[11]
        self.counts = memoryview(memory)[layout.OFFSET_COUNTS : layout.DESCRIPTION_OFFSET].cast("Q")
        """Collectives begun on each group that spans all workers, by its number."""
        self._groups_used = 0
        self._groups_capacity = ring_offset - layout.GROUPS_OFFSET
        self.append: Append = _make_append(memory, capacity, ring_offset)
        """Write one record; returns its seq. Raises only on values that do not fit."""

    @classmethod
    def create(
        cls,
        *,
        job: str,
        rank: int,
        world_size: int,
        description: Mapping[str, Any],
        capacity: int = DEFAULT_CAPACITY,
        environ: Mapping[str, str] = os.environ,
    ) -> RingWriter:
        """Make, preallocate and map the file; stale rings of dead jobs are removed first.

        capacity: records, rounded up to a power of two. In /dev/shm only where the rings of all
        this node's workers are a small part of what is free (`why_spared`). Raises CaptureError
        with the reason per folder when none can hold it; nothing is left behind then.
        """
        capacity = 1 << (capacity - 1).bit_length()
        pid = os.getpid()
        about = {
            **description,
            "job": job,
            "rank": rank,
            "world_size": world_size,
            "host": socket.gethostname(),
            "origin": Origin.of(environ).text,
            # what its collectives go through and along, as far as its environment tells
            "gloo_interface": environ.get("GLOO_SOCKET_IFNAME", "")[:_LONGEST],
            "nccl_algorithms": environ.get("NCCL_ALGO", "")[:_LONGEST],
            "pid": pid,
            "pid_start_ticks": process_start_ticks(pid) or 0,
            "pid_namespace": _pid_namespace(),
            "boot_id": _boot_id(),
            "start_monotonic_ns": time.monotonic_ns(),
            "start_epoch_ns": time.time_ns(),
            "capacity": capacity,
            "ops": layout.OPS,
            "dtypes": layout.DTYPES,
        }
        remove_stale(environ)
        reasons = []
        size, local = ring_bytes(capacity), environ.get("LOCAL_WORLD_SIZE", "")
        workers = max(1, int(local)) if local.isdecimal() else 1
        for folder in ring_folders(environ):
            made = why_spared(folder, size * workers, environ) or cls._create_in(folder, about)
            if isinstance(made, RingWriter):
                return made
            reasons.append(f"{folder}: {made}")
        raise CaptureError(
            f"no room for a ring of {(size - MAILBOX_BYTES) / 2**20:.1f} MiB "
            f"({'; '.join(reasons)}); free space there, name another folder in "
            "FAILSLOW_CAPTURE_FOLDER, or lower FAILSLOW_CAPTURE_RECORDS"
        )

    @classmethod
    def _create_in(cls, folder: Path, about: Mapping[str, Any]) -> RingWriter | str:
        """The ring, or why it cannot be made there."""
        pid, capacity, text = about["pid"], about["capacity"], json.dumps(about).encode()
        if len(text) > layout.DEVICE_OFFSET - layout.DESCRIPTION_OFFSET:
            return "the description of the job is too long"
        stem = f"failslow-{os.getuid()}-{about['job']}-r{about['rank']}-p{pid}"
        path, unfinished = folder / f"{stem}.ring", folder / f"{stem}.tmp"
        ring_offset = layout.GROUPS_OFFSET + GROUPS_CAPACITY
        size = ring_offset + capacity * layout.RECORD.size
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            unfinished.unlink(missing_ok=True)  # same pid: whoever made it is gone
            handle = os.open(unfinished, flags, 0o600)
        except OSError as error:
            return error.strerror or str(error)
        try:
            # Without it a full tmpfs would answer the first write with SIGBUS.
            os.posix_fallocate(handle, 0, size)
            # populated now: a page fault in the middle of a step costs more than a record
            memory = mmap.mmap(handle, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            layout.HEADER.pack_into(
                memory,
                0,
                layout.MAGIC,
                layout.VERSION,
                layout.RECORD.size,
                capacity,
                ring_offset,
                layout.DESCRIPTION_OFFSET,
                len(text),
                layout.GROUPS_OFFSET,
                GROUPS_CAPACITY,
                pid,
                about["rank"],
                about["world_size"],
            )
            memory[layout.DESCRIPTION_OFFSET : layout.DESCRIPTION_OFFSET + len(text)] = text
            os.rename(unfinished, path)  # a reader sees a whole ring or none
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            return error.strerror or str(error)
        finally:
            os.close(handle)
        return cls(path, memory, capacity, ring_offset)

    def add_group(self, entry: Mapping[str, Any]) -> bool:
        """Append a line to the group table; False when the table is full."""
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        end = self._groups_used + len(line)
        if end > self._groups_capacity:
            return False
        start = layout.GROUPS_OFFSET + self._groups_used
        self.memory[start : start + len(line)] = line
        self._groups_used = end
        layout.U64.pack_into(self.memory, layout.OFFSET_GROUPS_USED, end)
        return True

    def tell_device(self, about: Mapping[str, Any]) -> None:
        """What the worker computes on (`capture.device`); again: what was told before is replaced.

        One that is too long is left out.
        """
        text = json.dumps(about, separators=(",", ":")).encode()
        if about and len(text) <= layout.GROUPS_OFFSET - layout.DEVICE_OFFSET:
            self.memory[layout.DEVICE_OFFSET : layout.DEVICE_OFFSET + len(text)] = text
            layout.U64.pack_into(self.memory, layout.OFFSET_DEVICE, len(text))

    def count_fault(self) -> None:
        """A sample was lost to a fault of ours."""
        layout.U64.pack_into(self.memory, layout.OFFSET_FAULTS, self.faults + 1)

    @property
    def faults(self) -> int:
        """Samples lost to faults of ours."""
        return int(layout.U64.unpack_from(self.memory, layout.OFFSET_FAULTS)[0])

    @property
    def written(self) -> int:
        """Records appended so far."""
        return int(layout.U64.unpack_from(self.memory, layout.OFFSET_HEAD)[0])

    def close(self) -> None:
        """Say that the writer ended, and remove the file; a reader that has it mapped reads on.

        The mapping stays: a late call of another thread must not fault.
        """
        layout.U64.pack_into(self.memory, layout.OFFSET_CLOSED, 1)
        if os.getpid() == self.pid:
            self.path.unlink(missing_ok=True)


def _make_append(memory: mmap.mmap, capacity: int, ring_offset: int) -> Append:
    """A closure, since this runs once a collective: locals are cheaper than attributes."""
    pack, pack_head = layout.RECORD.pack_into, layout.U64.pack_into
    next_seq = itertools.count(1).__next__
    mask, width, head = capacity - 1, layout.RECORD.size, layout.OFFSET_HEAD
    longest = 0xFFFFFFFF

    def append(  # noqa: PLR0917  # keywords would cost more than the record
        start_ns: int,
        end_ns: int,
        wait_ns: int,
        size_bytes: int,
        call_ns: int,
        thread: int,
        peer: int,
        group_size: int,
        op: int,
        kind: int,
        dtype: int,
        flags: int,
        group: int,
    ) -> int:
        seq = next_seq()
        pack(
            memory,
            ring_offset + ((seq - 1) & mask) * width,
            seq,
            start_ns,
            end_ns,
            wait_ns,
            size_bytes,
            call_ns if call_ns < longest else longest,
            thread,
            peer,
            group_size,
            op,
            kind,
            dtype,
            flags,
            group,
            # never 0: pack clears the slot before it fills it
            seq % 65535 + 1,
        )
        pack_head(memory, head, seq)
        return seq

    return append
