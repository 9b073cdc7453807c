"""One labelled job as a picture: its times, the true episodes, and what detectors found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from benchmarks.detection.score import DetectedEpisode
from benchmarks.detection.suite import LabelledJob

__all__ = ["write"]


def write(job: LabelledJob, found: Mapping[str, Sequence[DetectedEpisode]], path: Path) -> None:
    """Write a self-contained HTML page; truth shaded red, claims as bars above the times."""
    series = job.series
    figure = go.Figure(layout={"title": job.describe(), "yaxis_type": "log"})
    figure.add_scatter(y=series.duration_s, mode="markers", marker_size=3, name="seconds")
    figure.add_scatter(y=job.iteration_s * job.factor, mode="lines", name="true, at first work")
    if not np.isnan(series.work).all():
        relative = series.work / series.work[0]
        figure.add_scatter(
            y=series.duration_s / relative,
            mode="markers",
            marker_size=2,
            name="seconds / work",
            visible="legendonly",
        )
    for true in job.episodes:
        figure.add_vrect(
            x0=true.first_index - 0.5,
            x1=true.last_index + 0.5,
            fillcolor="red",
            opacity=0.15,
            line_width=0,
        )
    top = float(series.duration_s.max())
    for row, (name, episodes) in enumerate(found.items()):
        for e in episodes:
            figure.add_scatter(
                x=[e.first_index, e.last_index],
                y=[top * 1.2 ** (row + 1)] * 2,
                mode="lines",
                line_width=6,
                name=f"{name} {e.kind} x{e.slowdown:.2f}",
            )
    figure.write_html(path, include_plotlyjs=True)
