"""track: one worker's call records -> its iterations, one `StepSample` each.

    tracker = Tracker(ops=("", "allreduce_", ...))
    samples = tracker.update(records)

See `failslow.track.tracker`.
"""

from failslow.track.tracker import Anchor, Source, Tracker, TrackState

__all__ = ["Anchor", "Source", "TrackState", "Tracker"]
