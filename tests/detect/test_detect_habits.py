"""Jobs with habits: evaluation in every other line, two kinds of batches, restarts, pauses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from series_of import Floats, job, levels, noise

from failslow.config import DetectConfig
from failslow.detect import Detector, analyze
from failslow.records import Run

RESTART = (Run(), Run(note="step numbers restart at 1"))


def runs(*lengths: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.repeat(np.arange(len(lengths)), lengths)


@pytest.mark.parametrize("slow", [1.12, 1.2, 1.45])
@pytest.mark.parametrize("healthy", [1, 2])
def test_evaluation_in_every_other_line_is_no_episode(slow: float, healthy: int) -> None:
    duration_s = levels((1200, 18.0), cv=0.003)
    duration_s[healthy::2] *= slow
    assert analyze(job(duration_s, iterations=50)).episodes == ()


def _two_kinds(rng: np.random.Generator, n: int) -> Floats:
    return np.where(np.arange(n) % 2, 1.3, 1.0)


def _a_third_longer(rng: np.random.Generator, n: int) -> Floats:
    return np.where(rng.random(n) < 0.3, 1.3, 1.0)


def _every_fourth(rng: np.random.Generator, n: int) -> Floats:
    return np.where(np.arange(n) % 4 == 3, 1.4, 1.0)


def _uneven(rng: np.random.Generator, n: int) -> Floats:
    return np.asarray(0.7 + rng.gamma(4.0, 0.075, n))


@pytest.mark.parametrize("habit", [_two_kinds, _a_third_longer, _every_fourth, _uneven])
@pytest.mark.parametrize("slowdown", [1.25, 1.6])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_fault_of_a_job_with_long_iterations_by_habit_is_found(
    habit: object, slowdown: float, seed: int
) -> None:
    assert callable(habit)
    duration_s = habit(np.random.default_rng(seed), 1500) * noise(1500, 0.02, seed)
    assert analyze(job(duration_s)).episodes == ()
    duration_s[600:800] *= slowdown
    (episode,) = analyze(job(duration_s)).episodes
    assert abs(episode.first_index - 600) <= 5
    assert abs(episode.last_index - 799) <= 10


def test_a_short_checkpoint_every_ten_iterations_hides_no_fault() -> None:
    duration_s = levels((259, 7.7), (47, 9.24), cv=0.026)
    duration_s[9::10] += 39.0
    (episode,) = analyze(job(duration_s)).episodes
    assert abs(episode.first_index - 259) <= 1


def test_flapping_that_is_mostly_healthy_is_as_slow_as_its_slow_parts() -> None:
    duration_s = levels((400, 1.0), *[(16, 1.5), (26, 1.0)] * 12, (300, 1.0))
    (episode,) = analyze(job(duration_s)).episodes
    assert episode.slowdown == pytest.approx(1.5, rel=0.02)
    assert episode.lost_s == pytest.approx(12 * 16 * 0.5, rel=0.05)
    assert [level.start_step for level in episode.levels] == [401]
    assert episode.levels[0].slowdown == pytest.approx(1.5, rel=0.02)
    assert "flapping" in episode.note


def test_a_changed_configuration_ends_the_episode_before_it() -> None:
    changed = (Run(), Run(note="batch_size 128 -> 32", config_changed=True))
    series = job(levels((500, 1.0), (100, 1.5), (400, 1.4)), run=runs(600, 400), runs=changed)
    slow, change = analyze(series).episodes
    assert (slow.start_step, slow.end_step) == (501, 601)
    assert slow.lost_s == pytest.approx(50, rel=0.05)
    assert (change.kind, change.start_step, change.note) == (
        "workload_change",
        601,
        "batch_size 128 -> 32",
    )


def test_a_job_that_is_twice_as_slow_since_its_restart_is_so_from_the_first_iteration() -> None:
    series = job(levels((500, 1.0), (500, 2.0)), run=runs(500, 500), runs=RESTART)
    analysis = analyze(series)
    (episode,) = analysis.episodes
    assert episode.start_step == 501
    assert episode.note == "since the restart"
    assert episode.lost_s == pytest.approx(500, rel=0.02)
    assert analysis.warnings == ("restarted once, at step 501",)


def test_a_decaying_warm_up_after_a_restart_is_no_part_of_the_slowness_after_it() -> None:
    duration_s = levels((500, 1.0), (500, 1.6))
    duration_s[500:520] = np.linspace(40.0, 4.0, 20)
    (episode,) = analyze(job(duration_s, run=runs(500, 500), runs=RESTART)).episodes
    assert episode.start_step == 521


def test_the_warm_up_of_the_restart_that_ends_an_episode_is_not_lost_to_it() -> None:
    duration_s = levels((500, 1.0), (100, 1.6), (400, 1.0))
    duration_s[600:602] = 100.0, 5.0
    analysis = analyze(job(duration_s, run=runs(600, 400), runs=RESTART))
    (episode,) = analysis.episodes
    assert episode.end_step == 601
    assert episode.lost_s == pytest.approx(60, rel=0.03)
    assert episode.peak_slowdown < 2
    assert analysis.spikes == 0


def test_a_pause_before_the_relief_is_not_the_length_of_the_episode() -> None:
    series = job(levels((500, 1.0), (200, 1.5), (400, 1.0)))
    paused_s = series.end_s + np.where(np.arange(1100) >= 700, 3600.0, 0.0)
    (episode,) = analyze(replace(series, end_s=paused_s, clocked=True)).episodes
    assert episode.duration_s == pytest.approx(300, rel=0.02)
    assert episode.end_s == pytest.approx(800, rel=0.02)


def test_work_that_varies_from_batch_to_batch_is_no_workload_change() -> None:
    work = np.random.default_rng(7).integers(500, 4000, 2000).astype(float)
    duration_s = (0.1 + work / 4000) * noise(2000, 0.02)
    duration_s[1200:1400] *= 1.4
    (episode,) = analyze(job(duration_s, work=work)).episodes
    assert episode.kind == "fail_slow"
    assert abs(episode.first_index - 1200) <= 2
    # nor does a little variation hide a change
    work = np.repeat([1024.0, 2048.0], 500) * noise(1000, 0.05, seed=3)
    (change,) = analyze(job(work / 1024 * noise(1000), work=work)).episodes
    assert change.kind == "workload_change"
    assert abs(change.first_index - 500) <= 1


def test_a_noisy_episode_that_eases_step_by_step_still_ends() -> None:
    rng = np.random.default_rng(37)
    iteration_s = np.where(rng.random((600, 10)) < 0.2, 2.0, 1.0)
    duration_s = iteration_s.mean(axis=1) * noise(600)
    ending = []
    for seed in range(20):
        shuffled = np.random.default_rng(seed).permutation(duration_s)
        shuffled[260:420] *= 1.5
        (episode,) = analyze(job(shuffled, iterations=10)).episodes
        ending.append(episode.last_index)
    assert max(abs(last - 419) for last in ending) <= 10


def test_a_speed_up_that_ended_is_not_called_a_slow_end() -> None:
    analysis = analyze(job(levels((600, 1.5), (100, 1.0), (600, 1.5), cv=0.02)))
    assert analysis.episodes == ()
    assert not any("the log ends before" in warning for warning in analysis.warnings)


def test_an_episode_of_one_run_ends_where_the_configuration_changes() -> None:
    changed = (Run(), Run(note="other model", config_changed=True))
    series = job(levels((300, 1.0), (100, 1.5), (50, 3.0)), run=runs(400, 50), runs=changed)
    detector = Detector()
    events = [e for i in range(450) for e in detector.update(series.sample(i), changed[i // 400])]
    # the run says it: a relief would claim that the job got healthy
    assert [(e.kind, e.first_index) for e in events[-2:]] == [("onset", 300), ("run", 400)]
    assert not detector.suspected
    fault, change = analyze(series).episodes
    assert (fault.kind, fault.first_index, fault.last_index) == ("fail_slow", 300, 399)
    assert (change.kind, change.first_index) == ("workload_change", 400)
    fault, change = analyze(series).episodes
    assert (fault.kind, fault.first_index, fault.last_index) == ("fail_slow", 300, 399)
    assert (change.kind, change.first_index) == ("workload_change", 400)


@pytest.mark.parametrize("seed", range(4))
def test_two_kinds_of_batches_are_no_episode_however_long_the_job(seed: int) -> None:
    duration_s = 0.2 * _two_kinds(np.random.default_rng(0), 20_000) * noise(20_000, 0.02, seed)
    analysis = analyze(job(duration_s))
    assert analysis.episodes == ()
    assert analysis.warnings == ()  # nor are its last iterations slow


def test_a_fault_of_a_job_with_evaluation_in_every_other_line_is_found() -> None:
    duration_s = levels((600, 18.0), cv=0.003)
    duration_s[2::2] *= 1.2
    duration_s[300:] *= 1.4
    (episode,) = analyze(job(duration_s, iterations=50)).episodes
    assert abs(episode.first_index - 300) <= 1


def test_an_episode_that_eased_to_a_level_hardly_slow_ends_soon_in_correlated_noise() -> None:
    late = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        drift = np.zeros(900)
        for i in range(1, 900):
            drift[i] = 0.75 * drift[i - 1] + 0.046 * rng.normal()
        duration_s = 0.2 * np.exp(drift)
        duration_s[300:340] *= 2.6
        duration_s[340:355] *= 1.085  # as after a mitigation
        events, _ = Detector(DetectConfig(min_duration_s=2.0)).extend(job(duration_s))
        ends = [event.index for event in events if event.kind == "relief"]
        late += ends[0] > 420
    assert late <= 1  # the level looked a little slower than it was
