"""The public surface, pinned: commands with their options, and the public names of every package.

A change here is a change for users: look at the difference, say it in the CHANGELOG, then

    FAILSLOW_UPDATE_GOLDEN=1 python -m pytest tests/cli/test_cli_surface.py
"""

from __future__ import annotations

import ast
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import failslow
from failslow.cli import app

GOLDEN = Path(__file__).with_name("surface.json")
ROOT = Path(failslow.__file__).parent


def command_line() -> dict[str, list[str]]:
    """Each command and what it takes: "--json: bool", "PATH...: required"."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, list[str]]]:
        taken = []
        for parameter in command.params:
            names = " ".join([*parameter.opts, *parameter.secondary_opts])
            if parameter.param_type_name == "argument":
                names = parameter.metavar + ("..." if parameter.nargs == -1 else "")
            is_flag = getattr(parameter, "is_flag", False)
            kind = "required" if parameter.required else "flag" if is_flag else "value"
            taken.append(f"{names}: {kind}")
        yield name, sorted(taken)
        for child, inner in sorted(getattr(command, "commands", {}).items()):
            yield from walk(f"{name} {child}", inner)

    return dict(walk("failslow", typer.main.get_command(app)))


def public_names() -> dict[str, list[str]]:
    """`__all__` of failslow, its modules and its packages, read without importing them."""
    found = {}
    for path in (ROOT / "__init__.py", *ROOT.glob("*.py"), *ROOT.glob("*/__init__.py")):
        module = ".".join(("failslow", *path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[module.removesuffix(".__init__")] = ast.literal_eval(node.value)
    return dict(sorted(found.items()))


def test_options_and_public_names_are_those_pinned() -> None:
    surface = {"commands": command_line(), "names": public_names()}
    text = json.dumps(surface, indent=1) + "\n"
    if os.environ.get("FAILSLOW_UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")

    pinned = json.loads(GOLDEN.read_text(encoding="utf-8"))

    told = "if this change is meant: " + (__doc__ or "").strip().splitlines()[-1].strip()
    assert surface["commands"] == pinned["commands"], told
    assert surface["names"] == pinned["names"], told


@pytest.mark.parametrize("module", public_names())
def test_every_public_name_exists(module: str) -> None:
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "failslow").startswith("failslow"):
            raise
        pytest.skip(f"{module} needs {error.name}, which is not installed")

    missing = [name for name in public_names()[module] if not hasattr(loaded, name)]

    assert missing == []
