"""Statistics the stages share: `bocd` finds change points, `robust` bears spikes.

In: plain arrays. Out: plain numbers and arrays. Needs numpy and scipy only.
"""
