"""Letters between a training process and its node's agent, through shared memory only.

In: JSON objects of either side. Out: the same objects at the other side, in order, each once. One
file beside the worker's ring (`….mail`, mode 0600), made by the worker; standard library only.

    worker = Mailbox.create(ring.path)          agent = Mailbox.open(path)
    worker.send({"topic":"facts","pp":2,…})     agent.send({"topic":"steer","id":3,…})
    worker.receive()  # [{"topic":"steer",…}]   agent.receive()  # [{"topic":"facts",…}]

A process in which several parts read, each its topic, has them ask for it: `receive("steer")`.
Neither side ever waits for the other: a letter for which there is no room is refused, and its
sender told. A side that is killed while it writes leaves its letter unsent. Each direction has one
sender and one reader; the agent may be another process after a restart. `attention` is one word
that the agent sets and the worker's hook looks at in each call on all ranks: while it is 0 it
looks at nothing else. (While a pause is in hand it is the agent's last sign of life.)
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from failslow.errors import CaptureError

__all__ = ["MAILBOX_BYTES", "MAX_LETTER", "OFFSET_ATTENTION", "Mailbox", "mail_path"]

_MAGIC: Final = b"FSMAIL01"
_HEAD: Final = struct.Struct("<II")
"""Of a letter: its length and its checksum."""
OFFSET_ATTENTION: Final = 64
"""Where `attention` lies (eight bytes), for code that reads the word by itself."""
# Each word has a cache line of its own: its writer and its reader sit on different cores.
_DOWN: Final = (128, 192, 4096, 256 * 1024)
"""Agent to worker: offsets of the bytes written and read so far, of the letters, and their room."""
_UP: Final = (256, 320, _DOWN[2] + _DOWN[3], 512 * 1024)
MAILBOX_BYTES: Final = _UP[2] + _UP[3]
"""What a mailbox takes in the folder of the rings."""
MAX_LETTER: Final = 128 * 1024
"""Bytes of JSON a letter may have."""
_KEPT: Final = 64
"""Letters of a topic that wait for its reader; the oldest give way."""


def mail_path(ring: Path) -> Path:
    """Where the mailbox of the worker with that ring is."""
    return ring.with_suffix(".mail")


class Mailbox:
    """One end. Make it with `create` (the worker) or `open` (the agent)."""

    def __init__(self, path: Path, memory: mmap.mmap, *, is_worker: bool) -> None:
        self.path = path
        self.refused = 0
        """Letters that found no room or no form."""
        self.damaged = 0
        """Times what waited was thrown away, because it could not be read."""
        self._memory = memory
        # stores of a cast view are one instruction; struct clears the bytes before it fills them
        self._words = memoryview(memory)[:512].cast("Q")
        self._is_worker = is_worker
        self._out, self._in = (_UP, _DOWN) if is_worker else (_DOWN, _UP)
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._kept: dict[str, deque[dict[str, Any]]] = {}
        self._pid = os.getpid()

    @classmethod
    def create(cls, ring: Path) -> Mailbox:
        """The worker's end, beside its ring. Raises CaptureError where there is no room."""
        path = mail_path(ring)
        unfinished = path.with_suffix(".mailtmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            unfinished.unlink(missing_ok=True)  # same pid: whoever made it is gone
            handle = os.open(unfinished, flags, 0o600)
            try:
                # a full disk refuses now, not by SIGBUS
                os.posix_fallocate(handle, 0, MAILBOX_BYTES)
                memory = mmap.mmap(handle, MAILBOX_BYTES)
            finally:
                os.close(handle)
            memory[: len(_MAGIC)] = _MAGIC
            os.rename(unfinished, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise CaptureError(
                f"no room for a mailbox of {MAILBOX_BYTES >> 10} KiB at {path}: "
                f"{error.strerror or error}; free space there"
            ) from None
        return cls(path, memory, is_worker=True)

    @classmethod
    def open(cls, path: Path) -> Mailbox:
        """The agent's end. Raises CaptureError naming the file when it is no mailbox."""
        try:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise CaptureError(f"{path}: cannot be mapped: {error}") from None
        if len(memory) != MAILBOX_BYTES or memory[: len(_MAGIC)] != _MAGIC:
            raise CaptureError(f"{path}: is no mailbox of failslow; remove it")
        return cls(path, memory, is_worker=False)

    @property
    def memory(self) -> mmap.mmap:
        """The mapping, for code that looks at `OFFSET_ATTENTION` in every call."""
        return self._memory

    @property
    def attention(self) -> int:
        """What the agent wants looked at; 0 nothing."""
        return self._words[OFFSET_ATTENTION // 8]

    @attention.setter
    def attention(self, value: int) -> None:
        self._words[OFFSET_ATTENTION // 8] = value

    def send(self, letter: Mapping[str, Any]) -> bool:
        """Post a letter; False when there is no room for it, or it has no JSON form."""
        try:
            text = json.dumps(letter, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError):
            self.refused += 1
            return False
        head_at, tail_at, start, room = self._out
        with self._lock:
            if os.getpid() != self._pid and self._is_worker:
                return False  # a forked child: the mailbox is its parent's
            head, tail = self._word(head_at), self._word(tail_at)
            size = _HEAD.size + len(text)
            # a tail beyond the head was written by nobody sane: take the box as full
            if len(text) > MAX_LETTER or not 0 <= head - tail <= room - size:
                self.refused += 1
                return False
            self._put(start, room, head, _HEAD.pack(len(text), zlib.crc32(text)) + text)
            self._words[head_at // 8] = head + size  # last: now it is sent
        return True

    def receive(self, topic: str | None = None) -> list[dict[str, Any]]:
        """The letters that have come; what cannot be read is dropped and counted.

        topic: only letters of it; others stay for whoever asks for theirs, the latest few.
        """
        with self._reading:
            fresh = self._fetch()
            if topic is None:
                letters = [letter for kept in self._kept.values() for letter in kept] + fresh
                self._kept.clear()
                return letters
            for letter in fresh:
                self._kept.setdefault(str(letter.get("topic")), deque(maxlen=_KEPT)).append(letter)
            return list(self._kept.pop(topic, ()))

    def _fetch(self) -> list[dict[str, Any]]:
        head_at, tail_at, start, room = self._in
        head, tail = self._word(head_at), self._word(tail_at)
        letters: list[dict[str, Any]] = []
        while tail != head:
            letter, size = self._letter(start, room, tail, head)
            if size == 0:
                self.damaged += 1
                tail = head
                break
            tail += size
            if letter is not None:
                letters.append(letter)
        self._words[tail_at // 8] = tail
        return letters

    def remove(self) -> None:
        """Remove the file; who has it mapped reads on. Not in a forked child."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _letter(
        self, start: int, room: int, tail: int, head: int
    ) -> tuple[dict[str, Any] | None, int]:
        """(the letter at `tail`, bytes it takes); 0 bytes when nothing can be made of it."""
        if not _HEAD.size <= head - tail <= room:
            return None, 0
        length, check = _HEAD.unpack(self._get(start, room, tail, _HEAD.size))
        if length > min(MAX_LETTER, head - tail - _HEAD.size):
            return None, 0
        text = self._get(start, room, tail + _HEAD.size, length)
        if zlib.crc32(text) != check:
            return None, 0
        try:
            letter = json.loads(text)
        except ValueError:
            letter = None
        if not isinstance(letter, dict):
            self.damaged += 1
            letter = None
        return letter, _HEAD.size + length

    def _word(self, offset: int) -> int:
        return self._words[offset // 8]

    def _put(self, start: int, room: int, at: int, data: bytes) -> None:
        at %= room
        first = data[: room - at]
        self._memory[start + at : start + at + len(first)] = first
        rest = data[len(first) :]
        self._memory[start : start + len(rest)] = rest

    def _get(self, start: int, room: int, at: int, size: int) -> bytes:
        at %= room
        first = self._memory[start + at : start + min(room, at + size)]
        return first + self._memory[start : start + size - len(first)]
