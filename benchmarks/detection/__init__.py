"""The labelled suite of detection: jobs with known fail-slows, detectors, and the score.

python -m benchmarks.detection --jobs 1000 --seed 0
"""
