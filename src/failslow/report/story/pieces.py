"""Pieces of HTML that several sections of the page are made of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

__all__ = ["meter", "script", "select", "small", "switch", "table"]


def script(id: str, payload: Any) -> str:
    """Numbers for the page's own scripts."""
    # "</" would end the script element and "<!--" hide its end, wherever they stand in the JSON
    data = json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{id}">{data}</script>\n'


def switch(name: str, choices: Sequence[tuple[str, str, str]], chosen: str = "") -> str:
    """Buttons of which one is pressed: (value, label, title); the first, unless `chosen`."""
    chosen = chosen or choices[0][0]
    buttons = "".join(
        f'<button type="button" data-set="{name}" data-value="{value}" title="{escape(title)}" '
        f'aria-pressed="{str(value == chosen).lower()}">{escape(label)}</button>'
        for value, label, title in choices
    )
    return f'<span class="switch">{buttons}</span>'


def select(name: str, labels: Sequence[str], chosen: int, title: str) -> str:
    """One of `labels` to choose; its value is its number."""
    options = "".join(
        f'<option value="{i}"{" selected" if i == chosen else ""}>{escape(label)}</option>'
        for i, label in enumerate(labels)
    )
    return f'<select data-set="{name}" aria-label="{escape(title)}">{options}</select>'


def table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Heads beginning with ">" are of numbers; rows: (class, cells, which are HTML already)."""
    tags = [' class="n"' if head.startswith(">") else "" for head in heads]
    names = [head.lstrip(">") for head in heads]
    top = "".join(f"<th{tag}>{escape(name)}</th>" for tag, name in zip(tags, names, strict=True))
    lines = []
    for kind, cells in rows:
        tds = "".join(
            f'<td{tag} data-label="{escape(name)}">{cell}</td>' if cell else f"<td{tag}></td>"
            for tag, name, cell in zip(tags, names, cells, strict=True)
        )
        lines.append(f'<tr class="{kind}">{tds}</tr>' if kind else f"<tr>{tds}</tr>")
    return (
        f'<div class="scroll"><table class="stack"><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def small(text: str) -> str:
    """Text beneath, in small; nothing for ""."""
    return f'<span class="small">{escape(text)}</span>' if text else ""


def meter(share: float) -> str:
    """A bar for 0..1."""
    width = 100 * min(1.0, max(0.0, share))
    return f'<span class="meter"><i style="width:{width:.0f}%"></i></span>'
