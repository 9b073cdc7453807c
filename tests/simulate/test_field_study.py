"""The simulated field study: the published counts go in, and the tool gets them out again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from failslow.cli import app
from failslow.cli.fieldstudy import simulate_study
from failslow.report.fieldstudy import field_study_card, field_study_document
from failslow.simulate.fieldstudy import POPULATIONS, field_study
from failslow.simulate.job import iteration_s

ONE_NODE, FOUR_NODES, LARGE = POPULATIONS
FEW = (
    replace(ONE_NODE, jobs=8, fates=(("CPU", 2), ("GPU", 2))),
    replace(FOUR_NODES, jobs=8, fates=(("network", 4), ("CPU", 1))),
    replace(LARGE, jobs=3, fates=(("network", 1), ("network and GPU", 1)), nodes=(64,)),
)


def test_the_populations_have_the_counts_of_the_study() -> None:
    assert [(p.jobs, p.hit) for p in POPULATIONS] == [(392, 6), (107, 43), (27, 16)]


def test_jobs_are_hit_as_often_as_said_and_by_what_was_said() -> None:
    jobs = list(field_study(3, FEW))

    assert len(jobs) == 19
    assert Counter(job.fate for job in jobs) == {
        None: 8,
        "CPU": 3,
        "GPU": 2,
        "network": 5,
        "network and GPU": 1,
    }
    assert all(bool(job.scenario.faults) == (job.fate is not None) for job in jobs)


def test_faults_last_on_average_as_long_as_in_the_study() -> None:
    durations = [
        fault.for_s or 0.0
        for job in field_study(4, (replace(FOUR_NODES, jobs=43),))
        for fault in job.scenario.faults
    ]

    assert np.mean(durations) == pytest.approx(FOUR_NODES.mean_duration_s, rel=0.01)


def test_a_fault_slows_its_job_as_much_as_was_drawn() -> None:
    low, high = FOUR_NODES.slowdown
    for job in field_study(5, (replace(FOUR_NODES, jobs=5, fates=(("network", 5),)),)):
        healthy_s = iteration_s(job.scenario.but(faults=()))
        for fault in job.scenario.faults:
            ratio = iteration_s(job.scenario, fault.from_s) / healthy_s
            assert 0.98 * low <= ratio <= 1.05 * high


def test_equal_seeds_give_equal_studies() -> None:
    first, again, other = (list(field_study(seed, FEW[:2])) for seed in (6, 6, 7))

    assert [job.scenario for job in first] == [job.scenario for job in again]
    assert [job.scenario for job in first] != [job.scenario for job in other]


def test_every_fault_is_found_its_cause_named_and_the_ladder_saves_time() -> None:
    batch, study = simulate_study(
        2,
        min_slowdown=None,
        min_duration_s=None,
        config=None,
        pictures=True,
        quiet=True,
        populations=FEW,
    )

    assert len(batch.analyses) == 19
    for population, told in zip(study.populations, FEW, strict=True):
        assert population.hit == population.truly_hit == told.hit
        assert (population.false_alarms, population.missed) == (0, 0)
        assert (population.median_onset_error or 0) <= 2
        for _, true, named, right in population.causes:
            assert true == named == right
        lost = {result.policy: result.lost_s for result in population.policies}
        assert lost["clairvoyant"] <= min(lost.values()) + 1e-9
        assert lost["full ladder"] <= 4 * lost["clairvoyant"]
        assert population.culprits_right == population.faults
        assert population.innocents == 0
        assert lost["do nothing"] > 0
    large = {result.policy: result.saved_pct for result in study.populations[2].policies}
    assert large["full ladder"] > 30
    assert "policy" in field_study_card(study)
    document = json.loads(json.dumps(field_study_document(study)))
    assert [p["name"] for p in document["populations"]] == [p.name for p in FEW]


def test_study_takes_logs_or_a_seed_but_not_both() -> None:
    for arguments in (["study"], ["study", "train.log", "--simulate", "1"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert "--simulate" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_study_comes_out_as_published() -> None:
    result = CliRunner().invoke(app, ["study", "--simulate", "1", "--json"])

    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["jobs"] == 526
    for row in document["simulation"]["populations"]:
        assert row["hit"] == row["truly_hit"] == row["published_hit"]
        assert (row["false_alarms"], row["missed"]) == (0, 0)
        assert row["mean_duration_s"] == pytest.approx(row["published_duration_s"], rel=0.05)
        assert row["jct_increase_pct"] == pytest.approx(row["published_jct_increase_pct"], rel=0.1)
        assert row["culprits_right"] >= 0.85 * row["faults"]
        assert row["innocents"] == 0
