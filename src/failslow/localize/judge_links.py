"""Links and network cards of a verdict. Pure.

In: transfers as measured now and in healthy times. Out: findings about links and cards.

Transfers compare that are alike: between nodes or inside one, of the same size. Each link is
judged by the largest size it has: small messages hide a narrow link. Workers of a node share its
card, so what counts is the fastest of their transfers to another node.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from failslow.localize.levels import Compared, Limits, Reading, common_change, compare
from failslow.localize.network import Culprit, explain
from failslow.localize.readings import LinkReading, link_readings, listed, unmeasured
from failslow.localize.script import WorkerPlace, endpoint
from failslow.records import Finding, Measurement

__all__ = ["LinkJudge"]

Result = Mapping[str, Any]
End = tuple[str, str, int]
"""(node, card, -1), or for transfers inside a node (node, "", rank)."""
Link = tuple[End, End]
Sized = tuple[int, dict[Link, Reading]]

_WORKER_SHARE = 1.5
"""A worker whose processor takes x longer may make its transfers take so many times x longer."""
_HOLD_S = 0.1
"""...and so much more for one that a quota or signals hold now and then: for so long at a time."""
_ECHO = 0.4
"""A link whose way back is slower by x carries its acknowledgements late, and may look slow by
x to this power, from..."""
_ECHO_FROM = 8.0
_ECHO_LATE = 0.8
"""...and one into a card that is slow as a whole by so much of what its way back is late."""
_NOTHING = Reading(0.0)


class LinkJudge:
    """Judges once: `findings`, then `measured`, `notes` and `well`."""

    def __init__(
        self,
        places: Mapping[int, WorkerPlace],
        limits: Limits,
        slow_workers: Mapping[int, float],
        held_workers: Container[int] = (),
    ) -> None:
        """slow_workers: {rank: slowdown} of its processor. held_workers: those that do not run at
        times."""
        self.measured = 0
        self.notes: list[str] = []
        self._places = places
        self._through: dict[tuple[str, str], list[int]] = {}
        """Who sends and receives through each endpoint."""
        for rank in sorted(places):
            self._through.setdefault(endpoint(places[rank]), []).append(rank)
        self._limits = limits
        self._slow_workers = slow_workers
        self._held_workers = held_workers
        self._judged: dict[Link, tuple[int, Compared]] = {}
        self._explained: dict[str, list[Link]] = {}
        """By what makes them slow."""

    def findings(self, results: Iterable[Result], reference: Iterable[Result]) -> list[Finding]:
        """Slow links and cards."""
        results = list(results)
        now = link_readings(results, self._places)
        before = link_readings(reference, self._places)
        found: list[Finding] = []
        for inside in (False, True):
            these = [r for r in now if self._is_inside(r) == inside]
            those = [r for r in before if self._is_inside(r) == inside]
            judged = self._judge(these, those)
            self.measured += len(judged)
            self._judged |= judged
            found += self._resolve(judged, these)
        for why, links in self._explained.items():
            self.notes.append(f"transfers {_names(links)} are slow, as their {why} is")
        self._say_unmeasured(results, now)
        return found

    def well(self, results: Iterable[Result]) -> list[str]:
        """Keys of the links and cards that were measured and are as fast as they should be.

        A link at the largest size that was tried on it; a card if one link of it is, for a slow
        card makes all of its links slow.
        """
        fast: dict[Link, bool] = {}
        for link, size in self._tried(results).items():
            judged_at, compared = self._judged.get(link, (0, None))
            fast[link] = (
                compared is not None
                and judged_at >= size
                and not compared.is_slow
                and compared.ratio <= self._limits.peers
            )
        links: dict[str, list[bool]] = {}
        cards: dict[str, dict[End, bool]] = {}
        for (source, target), is_fast in fast.items():
            links.setdefault(_key(source[0], target[0]), []).append(is_fast)
            if source[2] < 0:
                for end, key in ((source, _key(source[0], "")), (target, _key("", target[0]))):
                    known = cards.setdefault(key, {})
                    known[end] = known.get(end, False) or is_fast
        found = [key for key, each in links.items() if all(each)]
        return found + [key for key, each in cards.items() if all(each.values())]

    def _tried(self, results: Iterable[Result]) -> dict[Link, int]:
        """The largest size that was to be sent over each link, whatever came of it."""
        tried: dict[Link, int] = {}
        for result in results:
            sender, receiver, size = (result.get(k) for k in ("rank", "peer", "size_bytes"))
            if result.get("do") != "p2p" or not isinstance(size, int):
                continue
            if not isinstance(sender, int) or not isinstance(receiver, int):
                continue
            if {sender, receiver} <= self._places.keys():
                mark = LinkReading(
                    sender=sender, receiver=receiver, size_bytes=size, reading=_NOTHING
                )
                link = self._link(mark)
                tried[link] = max(size, tried.get(link, 0))
        return tried

    def _is_inside(self, reading: LinkReading) -> bool:
        return self._places[reading.sender].node == self._places[reading.receiver].node

    def _link(self, reading: LinkReading) -> Link:
        return self._end(reading.sender, reading), self._end(reading.receiver, reading)

    def _end(self, rank: int, reading: LinkReading) -> End:
        if self._is_inside(reading):
            return (self._places[rank].node, "", rank)
        return (*endpoint(self._places[rank]), -1)

    def _by_size(self, readings: Iterable[LinkReading]) -> dict[int, dict[Link, Reading]]:
        sizes: dict[int, dict[Link, Reading]] = {}
        for item in readings:
            links = sizes.setdefault(item.size_bytes, {})
            link = self._link(item)
            known = links.get(link)
            if known is None or item.reading.value_s < known.value_s:
                links[link] = item.reading
        return sizes

    def _judge(
        self, now: Iterable[LinkReading], before: Iterable[LinkReading]
    ) -> dict[Link, tuple[int, Compared]]:
        """{link: (the largest size it could be compared at, how it was)}."""
        sizes, healthy = self._by_size(now), self._by_size(before)
        judged: dict[Link, tuple[int, Compared]] = {}
        for size in sorted(sizes, reverse=True):
            readings, reference = sizes[size], healthy.get(size, {})
            ratio = common_change(readings, reference)
            if ratio >= self._limits.reference:
                self.notes.append(f"all links are x{ratio:.2f} slower than at the reference, alike")
            for link, compared in compare(readings, reference, self._limits).items():
                # cut off early says nothing unless that was late already
                says_nothing = compared.is_excused or readings[link].at_least
                if link not in judged and (compared.is_slow or not says_nothing):
                    judged[link] = (size, compared)
        return judged

    def _resolve(
        self, judged: dict[Link, tuple[int, Compared]], readings: Iterable[LinkReading]
    ) -> list[Finding]:
        ranks = {self._link(r): (r.sender, r.receiver) for r in readings}
        slow = {link: c.ratio for link, (_, c) in judged.items() if c.is_slow}
        explained = {
            link
            for link in slow
            if self._is_explained(link, slow, ranks[link], judged[link][1].expected_s)
        }
        for link in explained:
            del slow[link]
        measured = [link for link in judged if link not in explained]
        culprits, unclear = explain(measured, slow)
        if unclear:
            self.notes.append(
                f"of the links {_names(unclear)} nobody can say whether it is they or their "
                "nodes' cards"
            )
        every: tuple[Culprit[End], ...] = (*culprits, *(Culprit("link", *u) for u in unclear))
        cards = {culprit.end for culprit in culprits if culprit.kind == "out"}
        return [
            self._finding(c, slow, judged) for c in every if not self._is_echo(c, cards, judged)
        ]

    def _is_echo(
        self,
        culprit: Culprit[End],
        cards: Container[End],
        judged: Mapping[Link, tuple[int, Compared]],
    ) -> bool:
        """Whether a link is late as its receiver's card sends acknowledgements late.

        They wait in the queue that what the card sends waits in, but are few: it is less late.
        """
        if culprit.peer is None or culprit.peer not in cards:
            return False
        link = culprit.end, culprit.peer
        back = judged.get((link[1], link[0]))
        if back is None or judged[link][1].late_s > _ECHO_LATE * back[1].late_s:
            return False
        self._explained.setdefault("way back", []).append(link)
        return True

    def _is_explained(
        self, link: Link, slow: Mapping[Link, float], ranks: tuple[int, int], expected_s: float
    ) -> bool:
        """By a worker that is slow itself, or by the way back."""
        worker = max(self._slow_workers.get(rank, 1.0) for rank in ranks)
        excused = _WORKER_SHARE * (worker - 1.0)
        if any(rank in self._held_workers for rank in ranks):
            excused += _HOLD_S / expected_s
        if slow[link] - 1.0 <= excused:
            self._explained.setdefault("worker", []).append(link)
            return True
        back = slow.get((link[1], link[0]), 1.0)
        return back >= _ECHO_FROM and math.log(slow[link]) <= _ECHO * math.log(back)

    def _finding(
        self,
        culprit: Culprit[End],
        slow: Mapping[Link, float],
        judged: Mapping[Link, tuple[int, Compared]],
    ) -> Finding:
        links = [link for link in slow if _is_of(culprit, link)]
        numbers = tuple(
            Measurement(
                what=f"send {size / 1e6:.3g} MB {_name(link[0])}>{_name(link[1])}",
                value=compared.value_s,
                unit="s",
                expected=compared.expected_s,
            )
            for link in links
            for size, compared in [judged[link]]
        )
        finding = Finding(
            what="link",
            slowdown=median(slow[link] for link in links),
            ranks=(),
            nic=culprit.end[1],
            measurements=numbers,
        )
        here, inside = self._workers(culprit.end), culprit.end[2] >= 0
        mates = self._mates(here) if inside else ()
        host, there = culprit.end[0], culprit.end[0] if inside else ""
        if culprit.kind == "in":
            facts = (f"all {len(links)} links measured to it are slow",)
            return replace(
                finding, ranks=mates, peer_ranks=here, host=there, peer_host=host, evidence=facts
            )
        finding = replace(finding, ranks=here, host=host)
        if culprit.kind == "out":
            facts = (f"all {len(links)} links measured from it are slow",)
            return replace(finding, peer_ranks=mates, peer_host=there, evidence=facts)
        assert culprit.peer is not None
        return replace(finding, peer_ranks=self._workers(culprit.peer), peer_host=culprit.peer[0])

    def _mates(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The other workers of their node."""
        node = self._places[ranks[0]].node
        places = sorted(self._places.items())
        return tuple(r for r, place in places if place.node == node and r not in ranks)

    def _workers(self, end: End) -> tuple[int, ...]:
        """Who sends and receives through an endpoint."""
        if end[2] >= 0:
            return (end[2],)
        return tuple(self._through.get(end[:2], ()))

    def _say_unmeasured(self, results: Iterable[Result], known: Iterable[LinkReading]) -> None:
        measured = {(r.sender, r.receiver) for r in known}
        failed: dict[str, list[str]] = {}
        for result in results:
            pair = (result.get("rank"), result.get("peer"))
            if result.get("do") == "p2p" and result.get("error") and pair not in measured:
                failed.setdefault(str(result["error"]), []).append(f"{pair[0]}>{pair[1]}")
        self.notes += unmeasured(failed, "transfers of ranks", "transfers of ranks")


def _key(host: str, peer_host: str) -> str:
    return Finding(what="link", slowdown=1.0, ranks=(), host=host, peer_host=peer_host).key


def _is_of(culprit: Culprit[End], link: Link) -> bool:
    if culprit.kind == "link":
        return link == (culprit.end, culprit.peer)
    return link[0 if culprit.kind == "out" else 1] == culprit.end


def _names(links: Iterable[Link]) -> str:
    return listed(f"{_name(a)}>{_name(b)}" for a, b in links)


def _name(end: End) -> str:
    return f"rank {end[2]}" if end[2] >= 0 else ":".join(filter(None, end[:2]))
