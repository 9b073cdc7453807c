"""Write the tables of `docs/settings.md` from the settings' own classes and descriptions.

In: `failslow.config`, its source for the texts below each setting. Out: the page with all between
its two marks replaced:

    | `min_slowdown` | `FAILSLOW_DETECT_MIN_SLOWDOWN` | 1.1 | > 1, ≤ 10 | × | An episode's … |

    python scripts/make_settings.py
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from failslow.config import StageConfig, stages

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
BEGIN, END = "<!-- written by scripts/make_settings.py: begin -->\n", "<!-- end -->\n"
_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
_UNITS = {"_per_s": "1/s", "_s": "s", "_bytes": "bytes", "_per_hour": "1/h", "_slowdown": "×"}
"""By how a name ends."""


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """The page with the tables as they are to be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(tables()) + END + after


def tables() -> Iterator[str]:
    """A section a stage, line by line."""
    for stage, cls in stages().items():
        yield f"\n## [{stage}]\n\n{inspect.cleandoc(cls.__doc__ or '')}\n"
        yield "| setting | variable | default | allowed | unit | |\n|---|---|---|---|---|---|"
        meanings = _meanings(cls)
        for name, field in cls.model_fields.items():
            variable = f"FAILSLOW_{stage}_{name}".upper()
            unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
            cells = (
                f"`{name}`", f"`{variable}`", _written(field.default), _allowed(field), unit,
                meanings[name],
            )  # fmt: skip
            yield f"| {' | '.join(cells)} |"
    yield ""


def _meanings(cls: type[StageConfig]) -> dict[str, str]:
    """The text below each setting; KeyError where one has none."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def _written(value: object) -> str:
    """As TOML has it; what is left out there has no value."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"{value:,.10g}"


def _allowed(field: Any) -> str:
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(choices)
    return ", ".join(
        f"{sign} {getattr(bound, name):,.10g}"
        for bound in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(bound, name, None) is not None
    )


if __name__ == "__main__":
    main()
