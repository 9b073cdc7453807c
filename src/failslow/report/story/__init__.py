"""The whole story of a watched job, from its journal: what `failslow report` shows.

In: the path of a journal. Out: a `Story`, and its three forms: terminal, JSON, one HTML page.

    story = read_story(Path("failslow-runs/pretrain7/journal.jsonl"), name="pretrain7")
    story.cases[0].key_findings, story.analysis.lost_s
    write_story(Path("failslow-report.html"), story)

Nothing is detected, compared or decided here: the journal already says it.
"""

from __future__ import annotations

from failslow.report.story.document import story_document
from failslow.report.story.model import Case, Story
from failslow.report.story.page import write_story
from failslow.report.story.reading import read_story
from failslow.report.story.terminal import story_view

__all__ = ["Case", "Story", "read_story", "story_document", "story_view", "write_story"]
