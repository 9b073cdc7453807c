"""The job token, and the HMAC envelope every message of a job travels in.

In: payload bytes and the time. Out: sealed bytes, and from sealed bytes a `Message` or nothing.
Whoever can reach the bus may read, delay, drop or repeat messages; without the token nobody
can make one, alter one, move one to another topic or job, or have one accepted twice.

An envelope is `header | sender | payload | HMAC-SHA256`, the header being magic, version,
session, sequence number, sent time and the sender's length. The HMAC (RFC 2104) also covers
job and topic, which do not travel.

>>> sealer = Sealer("0123456789abcdef", job="pretrain", sender="node-7", session=1)
>>> opener = Opener("0123456789abcdef", job="pretrain")
>>> sealed = sealer.seal("steps", b'{"rank":3}', now_s=1745735250.9)
>>> opener.open("steps", sealed, now_s=1745735251.0)  # doctest: +NORMALIZE_WHITESPACE
Message(topic='steps', sender='node-7', session=1, sequence=1, sent_s=1745735250.9,
        payload=b'{"rank":3}')
>>> opener.open("steps", sealed, now_s=1745735251.0) is None  # a replay
True
>>> opener.rejected["replayed"]
1
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from failslow.errors import ConfigError

__all__ = ["ENVELOPE_BYTES", "MIN_TOKEN_CHARS", "Message", "Opener", "Sealer", "load_token"]

MIN_TOKEN_CHARS = 16
"""Shorter tokens are refused: they can be guessed from one captured message."""
_MAGIC = b"FSM1"
_HEADER = struct.Struct(">4sQQdB")
_MAC_BYTES = 32
_MAX_SENDER_BYTES = 255
ENVELOPE_BYTES = _HEADER.size + _MAX_SENDER_BYTES + _MAC_BYTES
"""The most an envelope adds to its payload."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message proven to come from a holder of the job token."""

    topic: str
    sender: str
    session: int
    """Random for each start of the sender, so that a restarted one is told from a replay."""
    sequence: int
    """1, 2, 3 … within (sender, session, topic)."""
    sent_s: float
    """Epoch seconds on the sender's clock."""
    payload: bytes


class Sealer:
    """Seals the messages of one sender. Not thread-safe; `session` must be new at each start."""

    def __init__(self, token: str, *, job: str, sender: str, session: int) -> None:
        self._key, self._job = _key(token), job
        self._sender = sender.encode()
        if not 1 <= len(self._sender) <= _MAX_SENDER_BYTES:
            raise ConfigError(
                f"sender name of {len(self._sender)} bytes: it must have 1 to "
                f"{_MAX_SENDER_BYTES}; shorten it"
            )
        self._session = session
        self._sequence: Counter[str] = Counter()

    def seal(self, topic: str, payload: bytes, *, now_s: float) -> bytes:
        """The envelope of the sender's next message on `topic`; `now_s` is epoch seconds."""
        self._sequence[topic] += 1
        head = _HEADER.pack(_MAGIC, self._session, self._sequence[topic], now_s, len(self._sender))
        body = head + self._sender + payload
        return body + _mac(self._key, self._job, topic, body)


class Opener:
    """Opens the envelopes of one job; what does not hold is counted in `rejected`, not raised.

    Messages of one (sender, session, topic) are accepted in strictly rising sequence, so each
    at most once and in order. `max_age_s` bounds what a receiver that has just started, and so
    remembers no sequence, can be made to accept again; clocks may differ by it in both ways.
    """

    def __init__(self, token: str, *, job: str, max_age_s: float = 300.0) -> None:
        self._key, self._job = _key(token), job
        if max_age_s <= 0:
            raise ConfigError(f"max_age_s is {max_age_s}: it must be above 0; 300 is the default")
        self._max_age_s = max_age_s
        self._seen: dict[tuple[bytes, int, str], tuple[int, float]] = {}
        self._forget_above = 4096
        self.rejected: Counter[str] = Counter()
        """Refused messages by reason: malformed, forged, stale, ahead, replayed."""
        self.missed = 0
        """Messages the senders numbered that never came: gaps in their sequences."""

    def open(self, topic: str, sealed: bytes, *, now_s: float) -> Message | None:
        """The message inside, or None when it is refused; `now_s` is epoch seconds."""
        found = self._examine(topic, sealed, now_s)
        if isinstance(found, Message):
            return found
        self.rejected[found] += 1
        return None

    def _examine(self, topic: str, sealed: bytes, now_s: float) -> Message | str:
        """The message, or the reason it is refused."""
        body = sealed[:-_MAC_BYTES]
        if len(body) < _HEADER.size or not body.startswith(_MAGIC):
            return "malformed"
        if not hmac.compare_digest(_mac(self._key, self._job, topic, body), sealed[-_MAC_BYTES:]):
            return "forged"
        _, session, sequence, sent_s, sender_size = _HEADER.unpack_from(body)
        sender = body[_HEADER.size : _HEADER.size + sender_size]
        if not now_s - sent_s <= self._max_age_s:  # also refuses NaN
            return "stale"
        if sent_s - now_s > self._max_age_s:
            return "ahead"
        key = (sender, session, topic)
        last, newest_s = self._seen.get(key, (sequence - 1, sent_s))
        if sequence <= last:
            return "replayed"
        self.missed += sequence - last - 1
        self._seen[key] = (sequence, max(sent_s, newest_s))
        self._forget(now_s)
        return Message(
            topic=topic,
            sender=sender.decode(errors="replace"),
            session=session,
            sequence=sequence,
            sent_s=sent_s,
            payload=body[_HEADER.size + sender_size :],
        )

    def _forget(self, now_s: float) -> None:
        """Drop the state of senders so long silent that the age limit refuses all they sent."""
        if len(self._seen) > self._forget_above:
            oldest_s = now_s - self._max_age_s
            self._seen = {key: seen for key, seen in self._seen.items() if seen[1] >= oldest_s}
            self._forget_above = max(4096, 2 * len(self._seen))


def load_token(environ: Mapping[str, str] | None = None, file: Path | None = None) -> str:
    """The job token: `FAILSLOW_TOKEN`, else the one in `file` (made when absent), else a new one.

    All processes of a job that share `file` get the same token, whoever comes first. Raises
    ConfigError when the token is short, or the file is readable by others or not writable.
    """
    environ = os.environ if environ is None else environ
    if environ.get("FAILSLOW_TOKEN"):
        token = environ["FAILSLOW_TOKEN"]
        _key(token)
        return token
    if file is None:
        return secrets.token_hex(32)
    try:
        _make_token_file(file)
        with file.open(encoding="ascii", errors="replace") as handle:
            status = os.fstat(handle.fileno())
            token = handle.read(4096).strip()
    except OSError as error:
        raise ConfigError(
            f"{file}: the job token cannot be kept there: {error.strerror or error}; "
            "choose a writable folder or set FAILSLOW_TOKEN"
        ) from None
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
        raise ConfigError(
            f"{file}: mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}: a job token "
            f"must be readable by user {os.geteuid()} alone; delete the file, a new one is made"
        )
    _key(token)
    return token


def _make_token_file(file: Path) -> None:
    """Create `file` with a new token in one step, so that no other process reads half of it."""
    if file.exists():
        return
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, secrets.token_hex(32).encode() + b"\n")
        if not file.exists():
            os.link(draft, file)
    except FileExistsError:
        pass  # another process of the job was first: its token counts
    finally:
        os.close(handle)
        draft.unlink()


def _key(token: str) -> bytes:
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"job token of {len(token)} characters: at least {MIN_TOKEN_CHARS} are needed; "
            "set FAILSLOW_TOKEN to the output of `openssl rand -hex 32`"
        )
    return token.encode()


def _mac(key: bytes, job: str, topic: str, body: bytes) -> bytes:
    # lengths before the names: ("ab", "c") and ("a", "bc") must not look alike
    names = (job.encode(), topic.encode())
    context = b"".join(struct.pack(">I", len(name)) + name for name in names)
    return hmac.digest(key, context + body, "sha256")
