"""Records <-> JSON lines: the file a watched job leaves behind, and all reports read.

In: any frozen dataclass of `records`, or a kind and a mapping. Out: one line an entry, and back:

    {"t":1745735250.9,"kind":"step","rank":3,"step":120,"duration_s":0.571,"end_s":68.5,...}
    {"t":1745735301.2,"kind":"episode","episode_kind":"fail_slow","slowdown":1.39,...}

`t` is epoch seconds, `kind` the class's name in lower case ("step" for `StepSample`); a field that
is itself called `t` or `kind` is written as `<kind>_<field>`. JSON knows no NaN or infinity: null
stands for them. A new record class needs nothing here.

    writer = JournalWriter(Path("failslow-runs/job/journal.jsonl"))
    writer.append(sample, t=time.time(), rank=3)
    for entry in read_journal(writer.path): print(entry.t, entry.kind, entry.record)

The journal is only ever appended to, a whole line in one write. When it reaches `max_bytes` it
becomes `journal.jsonl.1`, the one before `journal.jsonl.2`, and so on up to `keep`.
"""

from __future__ import annotations

from failslow.journal.codec import JournalEntry, decode_entry, encode_entry
from failslow.journal.reader import GrowingJournal, Journal, nothing_in, read_journal
from failslow.journal.writer import JournalHealth, JournalWriter

__all__ = [
    "GrowingJournal",
    "Journal",
    "JournalEntry",
    "JournalHealth",
    "JournalWriter",
    "decode_entry",
    "encode_entry",
    "nothing_in",
    "read_journal",
]
