"""The account of one fault: what it has cost, who is to blame, and what was done about it so far.

In: the policy's events. Out: numbers the policy compares. A fault that comes back soon after its
relief goes on with its account: flapping is one fault, and what it cost is not forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from failslow.config import DecideConfig
from failslow.decide.levels import Assessment
from failslow.records import Decision, Finding, LevelOption, Rung

__all__ = ["RUNGS", "SLACK_S", "Account"]

RUNGS: tuple[Rung, ...] = ("S1", "S2", "S3", "S4")
SLACK_S = 1e-6
"""Times this close are equal: epoch seconds have a resolution of a quarter of it."""
_SETTLES = 0.5
"""Of `relief_hold_s`: so long a culprit must be another before the first correction of a plan
follows it; all of it before any further one."""
_DWELL = 4.0
"""Times `relief_hold_s`: so long the first correction stands at least, the next one twice as long,
and so on."""


@dataclass(slots=True)
class Account:
    """One fault, from the onset of its first episode."""

    config: DecideConfig
    episode: str
    """The latest episode's id."""
    now_s: float
    began_s: float
    slowdown: float = 1.0
    """Of the job now."""
    measured: bool = True
    """`slowdown` is the job's own; else it is what the plan carried out last promised."""
    left: float | None = None
    """What that plan was measured to leave."""
    base: float = 1.0
    """Of the job if nothing had been done."""
    banked_s: float = 0.0
    """Lost in episodes that ended."""
    reported_s: float = 0.0
    """Lost in the present episode as of its last report..."""
    since_report_s: float = 0.0
    """...and since then, by the slowdown it reported."""
    before_s: float | None = None
    """What had been lost when the fault came back, until it is known whether it is the same one."""
    spent_s: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)
    recovered: set[str] = field(default_factory=set)
    """Culprits that were slow and are well: one of them coming back is a relapse."""
    relapses: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    """Verdicts that named each culprit."""
    well_since: dict[str, float] = field(default_factory=dict)
    restore_s: float = 0.0
    """From when on a plan whose culprits are all forgiven may be taken back (again)."""
    level: Rung = "S1"
    """What was decided last."""
    applied: Rung = "S1"
    """What was carried out last: behind `level` while pending, and S1 throughout advice."""
    pending: Decision | None = None
    planned_for: tuple[str, ...] = ()
    """Culprits of the last plan."""
    acted_at_lost_s: float = 0.0
    """What had been lost when the last plan was carried out..."""
    acted_s: float = 0.0
    """...when that was..."""
    acted_for: tuple[str, ...] = ()
    """...for which culprits..."""
    corrections: int = 0
    """...and how many plans for the same ones it has followed."""
    shifting: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Culprits that are not as slow as planned for: how slow instead, and since when."""
    changed: bool = False
    """Assessments are out of date..."""
    others: bool = False
    """...because culprits are others, or as slow as not before."""
    assessments: dict[Rung, Assessment] = field(default_factory=dict)
    options: tuple[LevelOption, ...] = ()
    failures: dict[Rung, int] = field(default_factory=dict)
    theta: float | None = None
    told: tuple[str, ...] | None = None
    """What the last "stay" rested on, so that it is said once."""
    manual: bool = False
    ignored: set[str] = field(default_factory=set)
    """Culprits a person wants nothing done about; one found later is none of them."""
    episode_over: bool = False
    """The latest episode has ended, or is not followed further."""
    resting_since: float | None = None
    """When the fault was over; None while it is on..."""
    woken_s: float = 0.0
    """...and when it came back."""

    @property
    def lost_s(self) -> float:
        """Seconds lost to slowness since onset."""
        return self.banked_s + self.reported_s + self.since_report_s

    @property
    def age_s(self) -> float:
        """Since the onset of its first episode: as long again it is expected to last."""
        return self.now_s - self.began_s

    @property
    def culprits(self) -> tuple[str, ...]:
        """`Finding.key` of each."""
        return tuple(self.findings)

    def blamed(self, level: Rung) -> tuple[str, ...]:
        """Those something is done about: no host is left out for one that is to be ignored."""
        wanted = tuple(key for key in self.findings if key not in self.ignored)
        return wanted if level == "S4" and wanted else self.culprits

    @property
    def rested(self) -> bool:
        """The fault is over."""
        return self.resting_since is not None

    @property
    def left_alone(self) -> bool:
        """Nothing more is to be done: a person said so, or all culprits look well already."""
        return self.manual or self.findings.keys() <= self.well_since.keys() | self.ignored

    @property
    def outlived(self) -> bool:
        """What was done was for a culprit that is well, too, and only ignored ones are left."""
        others = set(self.acted_for) - self.findings.keys()
        return bool(
            others
            and self.applied != "S1"
            and not self.manual
            and not self.findings.keys() <= self.well_since.keys()
        )

    @property
    def replan_from_s(self) -> float | None:
        """From when on there may be a new plan for the same culprits; None: not while one changes.

        The first one rests on a rough measurement and is corrected soon, then ever more seldom.
        """
        if self.acted_for != self.culprits:
            return self.now_s
        if self.shifting:
            return None
        if not self.corrections:
            return self.acted_s
        dwell = _DWELL * 2.0 ** min(self.corrections - 1, 16)
        return self.acted_s + self.config.relief_hold_s * dwell

    def act(self, culprits: tuple[str, ...], *, again: bool) -> None:
        """A plan for them was carried out; again: at the level there was."""
        same = again and culprits == self.acted_for
        self.corrections = self.corrections + 1 if same else 0
        self.acted_s, self.acted_at_lost_s, self.acted_for = self.now_s, self.lost_s, culprits

    @property
    def loss_rate(self) -> float:
        """Seconds lost per second."""
        return max(0.0, 1.0 - 1.0 / self.slowdown)

    def advance(self, now_s: float) -> None:
        """Time goes on, and the loss with it."""
        if not self.rested and now_s > self.now_s:
            self.since_report_s += (now_s - self.now_s) * self.loss_rate
        self.now_s = max(self.now_s, now_s)

    def paused(self, pause_s: float) -> None:
        """Training stood still so long, by a pause of our own: that is no loss by slowness."""
        self.since_report_s = max(0.0, self.since_report_s - pause_s * self.loss_rate)

    def report(self, episode: str, lost_s: float, slowdown: float) -> None:
        """The job's own numbers replace what was reckoned since the last ones."""
        if episode != self.episode:
            self.bank(self.reported_s + self.since_report_s)
            self.episode = episode
        self.reported_s, self.since_report_s = lost_s, 0.0
        self.episode_over = False
        self.slowdown, self.measured = slowdown, True
        self.base = slowdown if self.applied == "S1" else max(self.base, slowdown)

    def bank(self, lost_s: float) -> None:
        """The present episode is over and has lost `lost_s`."""
        self.banked_s += lost_s
        self.reported_s = self.since_report_s = 0.0

    def accuse(self, findings: Sequence[Finding]) -> None:
        """A verdict named `findings`. Where none is among the culprits before, the fault is another
        one: what was lost before it came is none of its loss."""
        before_s, self.before_s = self.before_s, None
        known = {finding.key for finding in findings} & self.recovered
        if before_s is not None and self.recovered and not known:
            self.banked_s = max(0.0, self.banked_s - before_s)  # an episode's own begins anew
            self.spent_s, self.began_s, self.theta = 0.0, self.woken_s, None
        for finding in findings:
            self._blame(finding)

    def _blame(self, finding: Finding) -> None:
        key = finding.key
        self.seen[key] = self.seen.get(key, 0) + 1
        self.well_since.pop(key, None)
        self.shifting.pop(key, None)
        if key in self.recovered:
            self.recovered.discard(key)
            self.relapses += 1
        self._set(finding)

    def pace(self, key: str, slowdown: float) -> None:
        """A culprit's own time is so long now."""
        if key not in self.findings:
            return
        if slowdown <= self.config.relief_slowdown:
            self.well_since.setdefault(key, self.now_s)
            self.shifting.pop(key, None)
            return
        is_slow = slowdown >= self.config.min_slowdown
        if is_slow:
            self.well_since.pop(key, None)
        if self.applied != "S1":
            self._shift(key, slowdown)
        elif is_slow:
            self._set(replace(self.findings[key], slowdown=slowdown))

    def _shift(self, key: str, slowdown: float) -> None:
        """A plan is in force: none follows a culprit that is on its way somewhere."""
        band, known = self.config.min_gain, self.findings[key].slowdown
        if abs(slowdown - known) <= band * known:
            self.shifting.pop(key, None)
            return
        before = self.shifting.get(key, (0.0, 0.0))[0]
        if abs(slowdown - before) > 2.0 * band * before:  # noise goes both ways
            self.shifting[key] = (slowdown, self.now_s)

    @property
    def settle_s(self) -> float:
        """How long a culprit must be as slow as it is to be planned for anew."""
        return self.config.relief_hold_s * (1.0 if self.corrections else _SETTLES)

    def settle(self) -> None:
        """Believe what has lasted; a culprit of which nothing is told is as it was."""
        for key, (slowdown, since_s) in list(self.shifting.items()):
            if self.now_s - since_s >= self.settle_s - SLACK_S:
                del self.shifting[key]
                self._set(replace(self.findings[key], slowdown=slowdown))

    def _set(self, finding: Finding) -> None:
        known = self.findings.get(finding.key)
        ratio = 0.0 if known is None else finding.slowdown / known.slowdown
        # as much better or worse as a plan must be to be worth it: less is noise
        if not 1.0 - self.config.min_gain <= ratio <= 1.0 + self.config.min_gain:
            self.findings[finding.key] = finding
            self.changed = self.others = True

    @property
    def hold_s(self) -> float:
        """How long a culprit must be well to be believed."""
        return self.config.relief_hold_s * 2.0 ** min(self.relapses, 16)

    def well(self) -> list[str]:
        """Culprits that have recovered for good, as far as can be said."""
        enough_s = self.hold_s - SLACK_S
        return [key for key, since in self.well_since.items() if self.now_s - since >= enough_s]

    def forgive(self, keys: list[str]) -> None:
        """These culprits have recovered."""
        for key in keys:
            del self.findings[key]
            self.well_since.pop(key, None)
            self.shifting.pop(key, None)
            self.ignored.discard(key)
            self.recovered.add(key)
        self.changed = self.others = True

    def rest(self) -> None:
        """The fault is over; what was learned of it is kept."""
        self.forgive(list(self.findings))
        self.level = self.applied = "S1"
        self.slowdown = self.base = 1.0
        self.measured, self.left = True, None
        self.assessments, self.options, self.told = {}, (), None
        self.failures = {}
        self.manual, self.acted_for, self.corrections = False, (), 0
        self.resting_since = self.now_s

    def wake(self) -> None:
        """It is back, or another one has come."""
        self.resting_since, self.woken_s, self.before_s = None, self.now_s, self.lost_s
