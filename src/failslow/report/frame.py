"""What every page of ours is made of: head, tiles, and the tail with the scripts.

In: titles and figures. Out: pieces of one HTML file that needs nothing else: plotly.js inside, no
network, works offline. Its content security policy forbids every request.

    page_head("train.log", "1 fail-slow") + page_tiles([("×1.39", "worst slowdown", "bad")])
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

__all__ = ["page_head", "page_tail", "page_tiles"]

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<header><h1>{title}</h1><span class="sub">{subtitle}</span>\
<button class="theme" type="button">light / dark</button></header>
<main>
"""
_TAIL = """</main>
<footer>failslow {version}{when}. Drag to zoom, double-click to reset, hover for the numbers.\
</footer>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def page_head(title: str, subtitle: str) -> str:
    """From the doctype to the beginning of `main`."""
    return _HEAD.format(title=escape(title), subtitle=escape(subtitle), css=_asset("report.css"))


def page_tiles(tiles: Sequence[tuple[str, str, str]]) -> str:
    """Figures on top of a page: (value, label, "good", "bad" or "")."""
    cells = (
        f'<div class="tile {mood}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label, mood in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>\n'


def page_tail(*scripts: str, made_at: str = "") -> str:
    """The footer, plotly.js, and the scripts of these names in `assets`.

    made_at: printed in the footer; left out of the page when empty.
    """
    from plotly.offline import get_plotlyjs

    import failslow

    return _TAIL.format(
        version=failslow.__version__,
        when=f", {escape(made_at)}" if made_at else "",
        plotly=get_plotlyjs(),
        script="</script>\n<script>".join(_asset(script) for script in scripts),
    )


def _asset(name: str) -> str:
    return (files("failslow.report") / "assets" / name).read_text(encoding="utf-8")
