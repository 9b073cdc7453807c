"""Iteration times -> fail-slow episodes.

In: `StepSample`s one at a time (`Detector`), or a `StepSeries` (`analyze`). Out: `DetectEvent`s,
or a `JobAnalysis`. Pure: time is what the samples say.
"""

from failslow.detect.batch import analyze
from failslow.detect.events import DetectEvent
from failslow.detect.online import Detector

__all__ = ["DetectEvent", "Detector", "analyze"]
