"""What is a fail-slow and what is not, one case a test."""

from __future__ import annotations

import numpy as np
import pytest
from series_of import Floats, job, levels, noise

from failslow.config import DetectConfig
from failslow.detect import Detector, analyze
from failslow.records import Run


def test_a_clean_job_has_no_episode() -> None:
    analysis = analyze(job(levels((3000, 0.5), cv=0.05)))
    assert analysis.episodes == ()
    assert analysis.lost_s == 0.0
    assert analysis.healthy_iteration_s == pytest.approx(0.5, rel=0.01)


def test_a_step_is_found_where_it_is_with_its_loss() -> None:
    analysis = analyze(job(levels((400, 0.5), (200, 0.7), (400, 0.5))))
    (episode,) = analysis.episodes
    assert (episode.first_index, episode.last_index) == (400, 599)
    assert (episode.start_step, episode.end_step) == (401, 601)
    assert episode.slowdown == pytest.approx(1.4, rel=0.01)
    assert episode.lost_s == pytest.approx(200 * 0.2, rel=0.03)
    assert analysis.jct_increase_pct == pytest.approx(100 * 40 / 500, rel=0.03)
    assert episode.confidence > 0.99
    assert episode.kind == "fail_slow"


def test_suspected_within_six_iterations_then_confirmed_then_relieved() -> None:
    events, _ = Detector().extend(job(levels((300, 1.0), (60, 1.15), (100, 1.0), cv=0.03)))
    kinds = [e.kind for e in events]
    assert kinds[:2] == ["suspected", "onset"]
    assert kinds[-1] == "relief"
    assert 304 <= events[0].index <= 306
    # ten seconds and twelve healthy iterations must have passed
    assert events[1].index >= 300 + 10
    assert abs(events[-1].first_index - 360) <= 2


def test_five_slow_iterations_are_suspected_and_cleared() -> None:
    events, _ = Detector().extend(job(levels((300, 1.0), (5, 1.5), (100, 1.0))))
    assert [e.kind for e in events] == ["suspected", "cleared"]


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("height", [1.5, 5.0, 30.0])
def test_spikes_are_no_episode_and_do_not_move_the_level(length: int, height: float) -> None:
    duration_s = levels((2000, 0.5), cv=0.02)
    for at in range(100, 1900, 150):
        duration_s[at : at + length] *= height
    analysis = analyze(job(duration_s))
    assert analysis.episodes == ()
    assert analysis.spikes == 12 * length
    assert analysis.healthy_iteration_s == pytest.approx(0.5, rel=0.01)


def test_periodic_checkpoints_are_spikes() -> None:
    duration_s = levels((2000, 0.5), cv=0.02)
    duration_s[49::50] += 4.0
    analysis = analyze(job(duration_s))
    assert analysis.episodes == ()
    assert analysis.spikes == 40


def test_spikes_inside_an_episode_do_not_count_as_its_loss() -> None:
    duration_s = levels((400, 0.5), (200, 0.7), (400, 0.5))
    duration_s[500] = 60.0
    analysis = analyze(job(duration_s))
    (episode,) = analysis.episodes
    assert episode.lost_s == pytest.approx(40.0, rel=0.05)
    assert episode.peak_slowdown < 2.0
    assert analysis.spike_lost_s == pytest.approx(59.3, rel=0.02)


def test_slow_drift_is_measured_against_the_healthy_reference() -> None:
    ramp = np.concatenate([np.ones(300), np.linspace(1.0, 1.4, 1500), np.full(500, 1.4)])
    (episode,) = analyze(job(ramp * noise(len(ramp)))).episodes
    assert 300 < episode.first_index < 1000
    assert episode.end_step is None
    assert episode.baseline_s == pytest.approx(1.0, rel=0.02)
    assert "gradual" in episode.note


def test_a_drift_that_stays_below_ten_per_cent_is_no_episode() -> None:
    ramp = np.concatenate([np.ones(300), np.linspace(1.0, 1.07, 2000)])
    assert analyze(job(ramp * noise(len(ramp), 0.02))).episodes == ()


def test_flapping_within_the_merge_gap_is_one_episode() -> None:
    parts = [(300, 0.5)] + [(40, 0.75), (40, 0.5)] * 5 + [(300, 0.5)]
    (episode,) = analyze(job(levels(*parts))).episodes
    assert "flapping" in episode.note
    assert abs(episode.first_index - 300) <= 1
    assert abs(episode.last_index - (300 + 9 * 40 - 1)) <= 1


def test_episodes_far_apart_stay_two() -> None:
    parts = [(300, 0.5), (100, 0.8), (400, 0.5), (100, 0.8), (300, 0.5)]
    assert len(analyze(job(levels(*parts))).episodes) == 2


def test_a_bursty_stretch_counts_when_its_median_is_slow() -> None:
    duration_s = levels((400, 0.5), (120, 0.5), (400, 0.5))
    rng = np.random.default_rng(1)
    duration_s[400:520] *= np.where(rng.random(120) < 0.7, 1.5, 1.0)
    (episode,) = analyze(job(duration_s)).episodes
    assert abs(episode.first_index - 400) <= 3
    assert abs(episode.last_index - 519) <= 3
    assert episode.slowdown == pytest.approx(1.5, rel=0.02)


def test_a_sparse_burst_is_no_episode() -> None:
    duration_s = levels((400, 0.5), (120, 0.5), (400, 0.5))
    duration_s[400:520:4] *= 1.5
    assert analyze(job(duration_s)).episodes == ()


def test_partial_recovery_is_a_lower_level_of_the_same_episode() -> None:
    (episode,) = analyze(job(levels((300, 0.5), (150, 1.0), (300, 0.625)))).episodes
    assert episode.end_step is None
    assert [level.slowdown for level in episode.levels] == pytest.approx([2.0, 1.25], rel=0.02)
    assert episode.levels[1].start_step == 451


def test_a_compound_fault_deepens_and_eases_inside_one_episode() -> None:
    (episode,) = analyze(
        job(levels((300, 0.5), (100, 0.7), (100, 1.4), (100, 0.7), (300, 0.5)))
    ).episodes
    assert [round(level.slowdown, 1) for level in episode.levels] == [1.4, 2.8, 1.4]
    assert episode.peak_slowdown == pytest.approx(2.8, rel=0.05)
    assert abs(episode.last_index - 599) <= 1


def test_a_speed_up_is_no_fail_slow_and_is_warned_of_as_slow_from_the_start() -> None:
    analysis = analyze(job(levels((300, 0.7), (900, 0.5))))
    assert analysis.episodes == ()
    assert any("slow from the start" in w for w in analysis.warnings)


def test_the_end_of_a_short_speed_up_is_no_fail_slow() -> None:
    assert analyze(job(levels((900, 0.7), (200, 0.5), (900, 0.7)))).episodes == ()


def test_slow_again_after_a_long_healthy_time_is_a_fail_slow() -> None:
    (episode,) = analyze(job(levels((100, 0.7), (2000, 0.5), (300, 0.7)))).episodes
    assert abs(episode.first_index - 2100) <= 1


def test_warm_up_counts_for_nothing() -> None:
    duration_s = levels((500, 0.5))
    duration_s[:4] = [50.0, 12.0, 1.4, 0.9]
    analysis = analyze(job(duration_s))
    assert analysis.episodes == ()
    assert analysis.spikes == 0


def test_a_restart_is_warned_of_and_its_slow_first_iterations_are_no_fault() -> None:
    duration_s = levels((300, 0.5), (300, 0.5))
    duration_s[300:304] = [60.0, 30.0, 2.0, 1.0]
    run = np.repeat([0, 1], 300)
    step = np.concatenate([np.arange(1, 301), np.arange(250, 550)])
    analysis = analyze(job(duration_s, run=run, runs=(Run(), Run()), step=step))
    assert analysis.episodes == ()
    assert any("restarted once, at step 250" in w for w in analysis.warnings)


def test_slower_after_a_restart_is_a_fail_slow() -> None:
    duration_s = levels((300, 0.5), (300, 0.65))
    run = np.repeat([0, 1], 300)
    (episode,) = analyze(job(duration_s, run=run, runs=(Run(), Run()))).episodes
    assert episode.first_index == 300
    assert "since the restart" in episode.note


def test_another_configuration_is_a_workload_change() -> None:
    duration_s = levels((300, 0.5), (300, 0.9))
    runs = (Run(), Run(note="batch_size 128 -> 256", config_changed=True))
    analysis = analyze(job(duration_s, run=np.repeat([0, 1], 300), runs=runs))
    (change,) = analysis.episodes
    assert change.kind == "workload_change"
    assert change.first_index == 300
    assert change.note == "batch_size 128 -> 256"
    assert analysis.lost_s == 0.0


def test_a_new_configuration_slower_per_sample_is_a_workload_change() -> None:
    duration_s = levels((300, 0.5), (300, 0.3))
    runs = (Run(), Run(note="batch_size 128 -> 32", config_changed=True))
    work = np.repeat([128.0, 32.0], 300)
    (change,) = analyze(job(duration_s, run=np.repeat([0, 1], 300), runs=runs, work=work)).episodes
    assert change.kind == "workload_change"
    assert change.slowdown == pytest.approx(2.4, rel=0.02)


def test_a_fault_after_a_new_configuration_is_found_against_the_new_level() -> None:
    duration_s = levels((300, 0.5), (300, 0.9), (100, 1.3), (300, 0.9))
    runs = (Run(), Run(note="x", config_changed=True))
    run = np.repeat([0, 1], [300, 700])
    found = analyze(job(duration_s, run=run, runs=runs)).fail_slows
    assert [(e.first_index, e.last_index) for e in found] == [(600, 699)]


@pytest.mark.parametrize("overhead", [0.0, 0.4])
def test_more_work_in_a_step_is_a_workload_change(overhead: float) -> None:
    work = np.repeat([1024.0, 2048.0], 400)
    duration_s = 0.5 * (overhead + (1 - overhead) * work / 1024) * noise(800)
    (change,) = analyze(job(duration_s, work=work)).episodes
    assert change.kind == "workload_change"
    assert abs(change.first_index - 400) <= 2
    assert "1024 -> 2048" in change.note


def test_a_smooth_ramp_of_work_is_a_workload_change() -> None:
    work = np.concatenate([np.full(300, 1000.0), np.linspace(1000, 3000, 2000), np.full(300, 3e3)])
    duration_s = 0.5 * (0.2 + 0.8 * work / 1000) * noise(len(work), 0.02)
    analysis = analyze(job(duration_s, work=work))
    assert [e.kind for e in analysis.episodes] == ["workload_change"]


def test_a_fault_on_top_of_more_work_is_found() -> None:
    work = np.repeat([1024.0, 2048.0], 600)
    duration_s = 0.5 * (work / 1024) * noise(1200)
    duration_s[900:1000] *= 1.4
    (fault,) = analyze(job(duration_s, work=work)).fail_slows
    assert (fault.first_index, fault.last_index) == (900, 999)
    assert fault.slowdown == pytest.approx(1.4, rel=0.02)
    assert fault.baseline_s == pytest.approx(1.0, rel=0.02)


def test_less_work_that_takes_as_long_is_no_alarm_of_its_own() -> None:
    work = np.repeat([2048.0, 1024.0], 400)
    assert analyze(job(levels((800, 0.5)), work=work)).fail_slows == ()


def test_a_planned_ramp_is_a_workload_change_but_a_step_in_it_is_a_fault() -> None:
    ramp = 0.15 * np.linspace(1.0, 1.2, 2000)
    duration_s = ramp * noise(2000)
    planned = analyze(job(duration_s.copy(), planned_ramp="the window grows"))
    assert [e.kind for e in planned.episodes] == ["workload_change"]
    duration_s[300:700] *= 1.5
    assert [
        (e.first_index, e.last_index)
        for e in analyze(job(duration_s, planned_ramp="the window grows")).fail_slows
    ] == [(300, 699)]


def test_records_of_many_iterations_weigh_as_many() -> None:
    analysis = analyze(job(levels((60, 0.2), (9, 0.4), (60, 0.2)), iterations=100))
    (episode,) = analysis.episodes
    assert (episode.first_index, episode.last_index) == (60, 68)
    assert episode.lost_s == pytest.approx(9 * 100 * 0.2, rel=0.05)
    assert analysis.iterations == 12900


def test_a_data_stall_is_named() -> None:
    duration_s = levels((400, 0.5), (200, 0.8), (400, 0.5))
    data_s = np.concatenate([np.full(400, 0.01), np.full(200, 0.30), np.full(400, 0.01)])
    (episode,) = analyze(job(duration_s, data_s=data_s)).episodes
    assert "data stall" in episode.note


def test_a_compute_fault_is_not_called_a_data_stall() -> None:
    (episode,) = analyze(
        job(levels((400, 0.5), (200, 0.8), (400, 0.5)), data_s=np.full(1000, 0.01))
    ).episodes
    assert "data" not in episode.note


def test_correlated_noise_raises_no_alarm() -> None:
    rng = np.random.default_rng(5)
    ar = np.zeros(20_000)
    shocks = rng.normal(0, 0.05 * np.sqrt(1 - 0.9**2), len(ar))
    for i in range(1, len(ar)):
        ar[i] = 0.9 * ar[i - 1] + shocks[i]
    assert analyze(job(np.exp(ar))).episodes == ()


def test_the_open_end_of_a_log_is_warned_of() -> None:
    analysis = analyze(job(levels((300, 1.0), (7, 1.5))))
    assert analysis.episodes == ()
    assert any("the log ends" in w for w in analysis.warnings)


@pytest.mark.parametrize("n", [1, 2, 9, 10, 19])
def test_a_short_log_is_read_and_warned_of(n: int) -> None:
    analysis = analyze(job(levels((n, 0.5))))
    assert analysis.episodes == ()
    assert any("too few" in w for w in analysis.warnings)
    assert analysis.healthy_iteration_s == pytest.approx(0.5, rel=0.05)


def test_the_settings_decide() -> None:
    series = job(levels((400, 0.5), (200, 0.6), (400, 0.5)))
    assert len(analyze(series).episodes) == 1
    assert analyze(series, DetectConfig(min_slowdown=1.3)).episodes == ()
    assert analyze(series, DetectConfig(min_duration_s=600.0)).episodes == ()
    quick = DetectConfig(min_duration_s=0.0)
    blip = job(levels((400, 0.1), (20, 0.15), (400, 0.1)))
    assert analyze(blip).episodes == ()
    assert len(analyze(blip, quick).episodes) == 1


def test_an_episode_longer_than_the_history_keeps_its_level() -> None:
    (episode,) = analyze(job(levels((400, 0.5), (40_000, 0.7), (400, 0.5)))).episodes
    assert abs(episode.first_index - 400) <= 1
    assert abs(episode.last_index - 40_399) <= 1
    assert episode.slowdown == pytest.approx(1.4, rel=0.01)


KNOWN = DetectConfig(min_duration_s=3.0, healthy_iteration_s=0.145)


def _events(duration_s: Floats, config: DetectConfig) -> list[tuple[str, int]]:
    events, _ = Detector(config).extend(job(duration_s))
    return [
        (event.kind, event.first_index) for event in events if event.kind in ("onset", "relief")
    ]


def test_a_job_slow_from_its_first_iteration_is_found_where_its_healthy_time_is_known() -> None:
    duration_s = levels((100, 0.2), (100, 0.13), cv=0.03)
    assert _events(duration_s, KNOWN) == [("onset", 0), ("relief", 100)]
    assert _events(duration_s, KNOWN.model_copy(update={"healthy_iteration_s": 0.0})) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_fault_in_a_noisy_start_is_found_where_the_healthy_time_is_known(seed: int) -> None:
    noisy = 0.13 * noise(20, 0.2, seed)
    duration_s = np.concatenate([noisy, levels((100, 0.21), (100, 0.13), cv=0.05, seed=seed)])
    (onset, begin), (relief, end) = _events(duration_s, KNOWN)
    assert (onset, relief) == ("onset", "relief")
    assert abs(begin - 20) <= 3
    assert abs(end - 120) <= 1


@pytest.mark.parametrize("level_s", [0.11, 0.13, 0.15])
@pytest.mark.parametrize("seed", range(3))
def test_a_job_as_fast_as_is_known_is_not_slow(level_s: float, seed: int) -> None:
    assert _events(levels((400, level_s), cv=0.05, seed=seed), KNOWN) == []


def test_a_job_faster_than_is_known_is_measured_against_itself() -> None:
    duration_s = levels((200, 0.11), (100, 0.14), (100, 0.11), cv=0.02)
    assert _events(duration_s, KNOWN) == [("onset", 200), ("relief", 300)]
