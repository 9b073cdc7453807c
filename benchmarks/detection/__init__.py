"""The labelled suite of detection: jobs with known fail-slows, detectors, and the score.

    python -m benchmarks.detection --jobs 1000 --seed 0      the suite, three detectors
    python -m benchmarks.detection.delay                     onset to suspicion
    python -m benchmarks.detection.real LOGS                 real logs
    python -m benchmarks.detection.tune                      the baselines' parameters

`suite` makes the jobs from `shapes` (what happens) and `render` (what a log shows of it).
"""
