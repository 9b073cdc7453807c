"""The progress bar of a campaign, on a made-up terminal."""

from __future__ import annotations

import errno
import io
import os
import pty
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from rich.console import Console
from tests.probe.probe_samples import record, result

from failslow.cli import campaignbar
from failslow.cli.campaign import ended_text
from failslow.cli.output import note
from failslow.cli.probe import _bar
from failslow.probe import ProbeSpec
from failslow.probe.campaign import Campaign, CampaignPlan, SizeClass, Start, Wait
from failslow.probe.run import Progress


def test_it_tells_what_ended_what_runs_and_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    made = partial(Console, file=screen, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(campaignbar, "stderr_console", lambda: made(highlight=False))
    campaign = Campaign(CampaignPlan(sizes=(SizeClass(nodes=1, probes=3),)))
    slow = result(
        result="compute", cause="CPU contention", onset_delay_s=1.0, slowdown=1.4,
        culprits=("host [gpu-1]", "host \x1b[2J\r"), culprit_causes=("", ""),
    )  # fmt: skip

    with campaignbar.campaign_bar(campaign, ended_text) as bar:
        for number, found in (("1n-0001", slow), ("1n-0002", result())):
            step = campaign.next(0.0)
            assert isinstance(step, Start)
            campaign.started(number, 0.0)
            bar.started(step, campaign.tally())
            bar.looked(campaign.tally(), queued=1, step=Wait(until_t=None))
            campaign.ended(number, "finished")
            bar.ended(record(number, found=found), campaign.tally())
        bar.looked(campaign.tally(), queued=0, step=Wait(until_t=9e9))

    told = screen.getvalue()
    assert "1n-0001.1: ×1.40, CPU contention: host [gpu-1], host \ufffd[2J\ufffd\n" in told.replace(
        "\r", ""
    )
    assert "1n-0002.1: healthy" in told
    assert "2/3" in told
    assert "1 hit · next in" in told


@pytest.fixture
def hang_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """stderr is a terminal, until this is called."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    stream = os.fdopen(theirs, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    left = [ours]

    def gone() -> None:
        os.close(left.pop())
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.write(theirs, b"x")

    yield gone
    for end in left:
        os.close(end)
    # what it could not write it would try to write again
    os.dup2(os.open(os.devnull, os.O_WRONLY), theirs)
    stream.close()


def test_a_terminal_that_is_closed_costs_a_campaign_nothing(hang_up: Callable[[], None]) -> None:
    campaign = Campaign(CampaignPlan(sizes=(SizeClass(nodes=1, probes=3),)))
    with campaignbar.campaign_bar(campaign, ended_text) as bar:
        campaign.started("1n-0001", 0.0)
        hang_up()
        campaign.ended("1n-0001", "finished")
        bar.ended(record(), campaign.tally())
        bar.looked(campaign.tally(), queued=0, step=Wait(until_t=None))
        note("nobody reads this")


def test_a_terminal_that_is_closed_costs_a_probe_nothing(hang_up: Callable[[], None]) -> None:
    with _bar(ProbeSpec(probe_id="p"), enabled=True) as show:
        show(Progress(train_s=1.0, iterations=10))
        hang_up()
        show(Progress(train_s=2.0, iterations=20))
