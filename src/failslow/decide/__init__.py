"""From a verdict and what remedies cost to what is to be done: pure planners, no clock, no torch.

In: `Verdict`s, the job's pace, `Outcome`s. Out: `Decision`s with a `Plan`.
"""
