"""Letters between a worker and its agent: in order, once, never blocking, whatever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from failslow.errors import CaptureError
from failslow.mailbox import MAX_LETTER, OFFSET_ATTENTION, Mailbox, mail_path


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """Where a worker's ring would be."""
    return tmp_path / "failslow-0-job-r3-p41822.ring"


_SENDER = """
import sys
from pathlib import Path
from failslow.mailbox import Mailbox
box, number = Mailbox.open(Path(sys.argv[1])), 0
print(flush=True)
while True:
    number += box.send({"number": number, "padding": "x" * (number % 700)})
"""


@given(
    moves=st.lists(st.one_of(st.integers(0, 40_000), st.just("receive")), min_size=1, max_size=60)
)
@settings(deadline=None)
def test_letters_come_in_order_and_once_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, moves: list[int | str]
) -> None:
    ring = tmp_path_factory.mktemp("box") / "w.ring"
    worker = Mailbox.create(ring)
    agent = Mailbox.open(mail_path(ring))
    for sender, reader in ((worker, agent), (agent, worker)):
        sent: list[int] = []
        came: list[dict[str, Any]] = []
        for move in moves:
            if move == "receive":
                came += reader.receive()
            elif sender.send({"n": len(sent), "text": "é" * int(move)}):
                sent.append(int(move))
        came += reader.receive()
        assert [(letter["n"], len(letter["text"])) for letter in came] == list(enumerate(sent))
        assert reader.damaged == 0


def test_a_full_box_refuses_and_takes_letters_again_once_read(ring: Path) -> None:
    worker = Mailbox.create(ring)
    agent = Mailbox.open(mail_path(ring))
    letter = {"text": "x" * (MAX_LETTER - 100)}
    sent = 0
    while worker.send(letter):
        sent += 1
    assert sent >= 2
    assert worker.refused == 1
    assert len(agent.receive()) == sent
    assert worker.send(letter)


def test_what_has_no_form_or_is_too_long_is_refused(ring: Path) -> None:
    worker = Mailbox.create(ring)
    assert not worker.send({"x": float("nan")})
    assert not worker.send({"x": object()})
    assert not worker.send({"x": "y" * (MAX_LETTER + 1)})
    assert worker.refused == 3
    assert Mailbox.open(mail_path(ring)).receive() == []


def test_an_agent_killed_while_it_sends_leaves_only_whole_letters(ring: Path) -> None:
    worker = Mailbox.create(ring)
    expected = 0
    for _ in range(5):
        command = [sys.executable, "-c", _SENDER, str(mail_path(ring))]
        agent = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert agent.stdout is not None
        agent.stdout.readline()
        numbers: list[int] = []
        until_s = time.monotonic() + 20.0
        while len(numbers) < 300 and time.monotonic() < until_s:
            numbers += [letter["number"] for letter in worker.receive()]
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        agent.stdout.close()
        numbers += [letter["number"] for letter in worker.receive()]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 300
        expected += 1
    assert worker.damaged == 0
    assert expected == 5


def test_damage_is_dropped_counted_and_not_for_good(ring: Path) -> None:
    worker = Mailbox.create(ring)
    agent = Mailbox.open(mail_path(ring))
    agent.send({"a": 1})
    at = bytes(worker.memory).index(json.dumps({"a": 1}, separators=(",", ":")).encode())
    worker.memory[at] = 0
    assert worker.receive() == []
    assert worker.damaged == 1
    agent.send({"b": 2})
    assert worker.receive() == [{"b": 2}]


@given(noise=st.binary(min_size=1, max_size=400), at=st.integers(64, 5000))
@settings(deadline=None)
def test_any_damage_leaves_both_ends_working(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    worker = Mailbox.create(tmp_path_factory.mktemp("box") / "w.ring")
    agent = Mailbox.open(worker.path)
    agent.send({"a": 1})
    worker.memory[at : at + len(noise)] = noise
    for box in (worker, agent):
        box.send({"c": 3})
        assert all(isinstance(letter, dict) for letter in box.receive())


def test_attention_is_one_word_at_its_offset(ring: Path) -> None:
    worker = Mailbox.create(ring)
    agent = Mailbox.open(mail_path(ring))
    assert worker.attention == 0
    agent.attention = 7
    assert worker.attention == 7
    assert worker.memory[OFFSET_ATTENTION] == 7


def test_a_forked_child_neither_sends_nor_removes(ring: Path) -> None:
    worker = Mailbox.create(ring)
    pid = os.fork()
    if pid == 0:
        sent = worker.send({"from": "the child"})
        worker.remove()
        os._exit(int(sent))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert worker.path.exists()
    assert Mailbox.open(worker.path).receive() == []


def test_it_is_private_and_says_what_is_wrong(ring: Path, tmp_path: Path) -> None:
    worker = Mailbox.create(ring)
    assert worker.path.stat().st_mode & 0o777 == 0o600
    worker.remove()
    with pytest.raises(CaptureError, match="cannot be mapped"):
        Mailbox.open(worker.path)
    other = tmp_path / "other.mail"
    other.write_bytes(b"something else")
    with pytest.raises(CaptureError, match="no mailbox"):
        Mailbox.open(other)
    with pytest.raises(CaptureError, match="free space"):
        Mailbox.create(tmp_path / "missing" / "w.ring")


def test_who_asks_for_a_topic_leaves_the_others_their_letters(ring: Path) -> None:
    worker = Mailbox.create(ring)
    agent = Mailbox.open(mail_path(ring))
    for number, topic in enumerate(("pause", "steer", "pause", "act")):
        assert agent.send({"topic": topic, "n": number})
    assert [letter["n"] for letter in worker.receive("pause")] == [0, 2]
    assert worker.receive("pause") == []
    assert agent.send({"topic": "steer", "n": 4})
    assert [letter["n"] for letter in worker.receive("steer")] == [1, 4]
    assert [letter["n"] for letter in worker.receive()] == [3]
    for number in range(1000):  # a topic nobody asks for does not fill the memory
        assert agent.send({"topic": "nobody", "n": number})
        worker.receive("pause")
    assert [letter["n"] for letter in worker.receive("nobody")][-1] == 999
    assert worker.receive() == []
