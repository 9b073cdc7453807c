"""Envelopes hold exactly what was sealed, once, in order, in time; tokens stay secret."""

from __future__ import annotations

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.errors import ConfigError
from failslow.runtime.security import ENVELOPE_BYTES, Opener, Sealer, load_token

TOKEN = "0123456789abcdef"
NOW_S = 1_745_735_250.0


def sealer(
    *, token: str = TOKEN, job: str = "job", sender: str = "node-1", session: int = 1
) -> Sealer:
    return Sealer(token, job=job, sender=sender, session=session)


def opener(*, token: str = TOKEN, job: str = "job", max_age_s: float = 300.0) -> Opener:
    return Opener(token, job=job, max_age_s=max_age_s)


@given(
    payload=st.binary(max_size=300),
    sender=st.text(st.characters(codec="utf-8"), min_size=1, max_size=50),
    topic=st.text(st.characters(codec="utf-8"), max_size=20),
    session=st.integers(0, 2**64 - 1),
)
def test_an_opened_envelope_holds_what_was_sealed(
    payload: bytes, sender: str, topic: str, session: int
) -> None:
    sealed = sealer(sender=sender, session=session).seal(topic, payload, now_s=NOW_S)
    assert len(sealed) <= len(payload) + ENVELOPE_BYTES
    message = opener().open(topic, sealed, now_s=NOW_S)
    assert message is not None
    assert (message.topic, message.sender, message.session) == (topic, sender, session)
    assert (message.sequence, message.sent_s, message.payload) == (1, NOW_S, payload)


@given(position=st.integers(min_value=0), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_refused(position: int, bit: int) -> None:
    sealed = bytearray(sealer().seal("steps", b'{"rank":3}', now_s=NOW_S))
    sealed[position % len(sealed)] ^= 1 << bit
    receiver = opener()
    assert receiver.open("steps", bytes(sealed), now_s=NOW_S) is None
    assert receiver.rejected["forged"] + receiver.rejected["malformed"] == 1


@given(noise=st.binary(max_size=200), cut=st.integers(0, 200))
def test_noise_and_cut_messages_are_refused_without_raising(noise: bytes, cut: int) -> None:
    receiver = opener()
    sealed = sealer().seal("steps", b"payload", now_s=NOW_S)
    assert receiver.open("steps", noise, now_s=NOW_S) is None
    assert receiver.open("steps", sealed[: min(cut, len(sealed) - 1)], now_s=NOW_S) is None
    assert receiver.rejected.total() == 2


@pytest.mark.parametrize("receiver", [opener(token="fedcba9876543210"), opener(job="other")])
def test_another_token_or_job_is_refused(receiver: Opener) -> None:
    assert receiver.open("steps", sealer().seal("steps", b"", now_s=NOW_S), now_s=NOW_S) is None
    assert receiver.rejected == {"forged": 1}


def test_job_and_topic_cannot_be_shifted_into_one_another() -> None:
    sealed = sealer(job="ab").seal("c", b"", now_s=NOW_S)
    assert opener(job="a").open("bc", sealed, now_s=NOW_S) is None


@given(order=st.lists(st.integers(0, 9), max_size=60))
def test_each_message_is_accepted_at_most_once_and_in_order(order: list[int]) -> None:
    sender, receiver = sealer(), opener()
    sealed = [sender.seal("steps", bytes([n]), now_s=NOW_S) for n in range(10)]
    found = [receiver.open("steps", sealed[n], now_s=NOW_S) for n in order]
    accepted = [message.sequence for message in found if message is not None]
    assert accepted == sorted(set(accepted))
    if accepted:
        assert receiver.missed == accepted[-1] - accepted[0] + 1 - len(accepted)
    assert receiver.rejected["replayed"] == len(order) - len(accepted)


def test_senders_sessions_and_topics_are_numbered_apart() -> None:
    receiver = opener()
    for sender, session in (("a", 1), ("a", 2), ("b", 1)):
        for topic in ("steps", "health"):
            sealed = sealer(sender=sender, session=session).seal(topic, b"", now_s=NOW_S)
            assert receiver.open(topic, sealed, now_s=NOW_S) is not None


@pytest.mark.parametrize(
    ("sent_s", "reason"),
    [
        (NOW_S - 60.5, "stale"),
        (NOW_S + 60.5, "ahead"),
        (float("nan"), "stale"),
        (float("inf"), "ahead"),
        (float("-inf"), "stale"),
    ],
)
def test_a_message_out_of_its_time_is_refused(sent_s: float, reason: str) -> None:
    receiver = opener(max_age_s=60)
    sealed = sealer().seal("steps", b"", now_s=sent_s)
    assert receiver.open("steps", sealed, now_s=NOW_S) is None
    assert receiver.rejected == {reason: 1}


def test_a_clock_within_the_age_limit_is_accepted() -> None:
    receiver = opener(max_age_s=60)
    sender = sealer()
    for sent_s in (NOW_S - 59, NOW_S + 59):
        assert receiver.open("steps", sender.seal("steps", b"", now_s=sent_s), now_s=NOW_S)


def test_forgotten_senders_cannot_be_replayed() -> None:
    receiver = opener(max_age_s=60)
    first = sealer(sender="first").seal("steps", b"", now_s=NOW_S)
    assert receiver.open("steps", first, now_s=NOW_S)
    later_s = NOW_S + 61
    for n in range(9_000):
        sealed = sealer(sender=f"node-{n}").seal("steps", b"", now_s=later_s)
        assert receiver.open("steps", sealed, now_s=later_s)
    assert len(receiver._seen) == 9_000  # the first one's state is gone
    assert receiver.open("steps", first, now_s=later_s) is None
    assert receiver.rejected == {"stale": 1}


def test_short_tokens_and_bad_settings_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"5 characters: at least 16.*FAILSLOW_TOKEN"):
        sealer(token="short")
    with pytest.raises(ConfigError, match="1 to 255"):
        sealer(sender="n" * 256)
    with pytest.raises(ConfigError, match="max_age_s"):
        opener(max_age_s=0)


def test_the_token_comes_from_the_environment_first(tmp_path: Path) -> None:
    assert load_token({"FAILSLOW_TOKEN": TOKEN}, tmp_path / "token") == TOKEN
    assert not (tmp_path / "token").exists()
    with pytest.raises(ConfigError):
        load_token({"FAILSLOW_TOKEN": "short"})


def test_generated_tokens_are_long_and_differ() -> None:
    first, second = load_token({}), load_token({})
    assert first != second
    assert re.fullmatch(r"[0-9a-f]{64}", first)


def test_processes_sharing_a_file_get_one_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(lambda _: load_token({}, file), range(64)))
    assert len(tokens) == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["token"]


def test_a_token_file_open_to_others_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    load_token({}, file)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"mode 0644.*alone; delete"):
        load_token({}, file)


def test_an_unwritable_token_folder_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(ConfigError, match="set FAILSLOW_TOKEN"):
        load_token({}, tmp_path / "plain" / "token")
