"""What was found, for people and programs: terminal tables, JSON documents, one HTML page.

In: `JobAnalysis` records (and their `StepSeries` for the picture). Out: text; nothing here
detects, reads logs or knows the command line.

    analysis_document([analysis])["jobs"][0]["episodes"][0]["slowdown"]  ->  1.39
    write_html(Path("report.html"), [job_picture(series, analysis)])
"""

from __future__ import annotations

from failslow.report.decimate import decimate
from failslow.report.html import write_html
from failslow.report.json import analysis_document, dumps, study_document
from failslow.report.picture import JobPicture, job_picture
from failslow.report.study import JobRow, Study, summarize

__all__ = [
    "JobPicture",
    "JobRow",
    "Study",
    "analysis_document",
    "decimate",
    "dumps",
    "job_picture",
    "study_document",
    "summarize",
    "write_html",
]
