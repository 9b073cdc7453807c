"""`failslow whatif`: an operation trace in; what slowed it, and what a fix would gain, out.

$ failslow whatif trace.parquet --meta meta.yaml --json | jq '.diagnosis[0]'
{"what": "stage imbalance", "where": "stage 3 (×1.41 the mean stage)", "share": 0.89}
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from failslow.cli import options
from failslow.cli.output import emit, emit_view, note, progress
from failslow.cli.page import check_target

__all__ = ["EXAMPLES", "whatif"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow whatif trace.parquet --meta meta.yaml

failslow whatif trace.csv --html whatif.html

failslow whatif trace.jsonl.gz --json | jq '.fixes[0]'
"""


def whatif(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="Operations of the workers: .parquet, .csv or .jsonl (also .gz)."
        ),
    ],
    *,
    meta: Annotated[
        Path | None,
        typer.Option(
            "--meta",
            metavar="FILE",
            help="YAML file with dp_size, pp_size, vpp_size; what the trace shows if left out.",
            rich_help_panel="Reading",
        ),
    ] = None,
    json: options.Json = False,
    html: options.Html = None,
    quiet: options.Quiet = False,
) -> None:
    """Replay a trace of operations and say what slowed it: a worker, a stage, the data.

    The trace has a row an operation: dp_rank, stage, step, optype, start_ts, duration, and maybe
    rank, seq_id, mc, mb_id, gmc (the schema of ByteDance's what-if analysis).
    """
    from failslow.ingest.traces import read_layout, read_trace
    from failslow.simulate.whatif import what_if

    with progress(2, enabled=not (quiet or json)) as begin:
        begin("reading")
        table = read_trace(trace, read_layout(meta) if meta else None)
        begin("replaying")
        found = what_if(table)
    if json:
        from failslow.report.json import dumps
        from failslow.report.whatif import whatif_document

        emit(dumps(whatif_document(found)) + "\n")
    elif not quiet:
        from failslow.report.whatif import whatif_view

        emit_view(whatif_view(found))
    if html is not None:
        from failslow.report.whatif_html import write_whatif_html

        check_target(html)
        made_at = f"{datetime.now(tz=timezone.utc):%Y-%m-%d %H:%M} UTC"
        write_whatif_html(html, found, made_at=made_at)
        if not quiet:
            note(f"wrote {html}")
