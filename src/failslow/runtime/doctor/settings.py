"""Checks of the software and of what the environment asks of it.

In: environment variables and the installed distributions. Out: one `Check` a question. Torch is
looked up, never imported.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata, util

import failslow
from failslow import config
from failslow.capture import builder
from failslow.errors import FailslowError
from failslow.runtime.doctor.base import OFF, Check, nodes_of
from failslow.runtime.security import load_token

__all__ = ["known_variables", "settings_checks", "unknown_variables"]

_TORCH_MIN = (2, 5)
_ENTRY = "failslow.capture.autoload:autoload"
_VARIABLES = (
    "FAILSLOW",
    "FAILSLOW_AGENT",
    "FAILSLOW_CAPTURE_BUILD",
    "FAILSLOW_CAPTURE_FOLDER",
    "FAILSLOW_CAPTURE_MODE",
    "FAILSLOW_CAPTURE_RECORDS",
    "FAILSLOW_CONFIG",
    "FAILSLOW_DEBUG",
    "FAILSLOW_DIR",
    "FAILSLOW_INJECT_FOLDER",
    "FAILSLOW_JOB",
    "FAILSLOW_LAUNCHED",
    "FAILSLOW_LAUNCHER",
    "FAILSLOW_MEETS",
    "FAILSLOW_NEEDS",
    "FAILSLOW_METRICS_PORT",
    "FAILSLOW_MODE",
    "FAILSLOW_NODE",
    "FAILSLOW_ORIGIN",
    "FAILSLOW_REAL_LOGS",
    "FAILSLOW_REAL_TRACES",
    "FAILSLOW_RESTARTED",
    "FAILSLOW_RUN",
    "FAILSLOW_TOKEN",
    "FAILSLOW_TRANSPORT",
)
_CHOICES = {
    "FAILSLOW_CAPTURE_MODE": ("native", "dispatcher", "python"),
    "FAILSLOW_MODE": ("observe", "advise", "auto"),
}


def settings_checks(environ: Mapping[str, str]) -> Iterator[Check]:
    """python, torch, autoload, compiled capture, variables, settings, token."""
    version = ".".join(map(str, sys.version_info[:3]))
    found = f"Python {version}, failslow {failslow.__version__} in {sys.prefix}"
    yield Check("python", "pass", found)
    yield _torch()
    yield _autoload(environ)
    yield _compiled(environ)
    yield _variables(environ)
    yield _settings(environ)
    yield _token(environ)


def known_variables() -> frozenset[str]:
    """Every environment variable that failslow, or one of its benchmarks, reads."""
    settings = (
        f"FAILSLOW_{stage}_{field}".upper()
        for stage, cls in config.stages().items()
        for field in cls.model_fields
    )
    return frozenset(_VARIABLES) | frozenset(settings)


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What is set and nothing reads, with what to do about it."""
    known, told = known_variables(), {}
    for name in sorted(environ):
        if name.startswith("FAILSLOW_") and name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            told[name] = f"did you mean {near[0]}?" if near else f"unset {name}"
    return told


def _torch() -> Check:
    remedy = f"{sys.executable} -m pip install 'failslow[torch]'"
    if util.find_spec("torch") is None:
        found = "torch is not installed for this Python: there is no job to watch"
        return Check("torch", "fail", found, f"{remedy}, or run doctor in the training environment")
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("torch", "info", "torch is there, of a version it does not say")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < _TORCH_MIN:
        found = f"torch {version} is too old: it loads no plugin before 2.5"
        return Check("torch", "fail", found, remedy)
    return Check("torch", "pass", f"torch {version}")


def _autoload(environ: Mapping[str, str]) -> Check:
    # torch's own test, so that exactly what it takes for "off" counts
    switch = environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if switch != "1":
        found = f"TORCH_DEVICE_BACKEND_AUTOLOAD={switch}: torch loads no plugin, failslow is one"
        return Check("autoload", "fail", found, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    named = [e for e in metadata.entry_points(group="torch.backends") if e.name == "failslow"]
    if not any(entry.value == _ENTRY for entry in named):
        other = f": it is {named[0].value}" if named else ""
        return Check(
            "autoload",
            "fail",
            f"failslow's entry point in torch.backends is missing{other}",
            f"{sys.executable} -m pip install --force-reinstall --no-deps failslow",
        )
    return Check("autoload", "pass", "torch will load failslow's entry point")


def _compiled(environ: Mapping[str, str]) -> Check:
    """Whether calls are captured in C++ or, at some ten times the cost, in Python."""
    name, asked = "compiled capture", environ.get("FAILSLOW_CAPTURE_MODE", "")
    if asked in ("dispatcher", "python"):
        found = f"FAILSLOW_CAPTURE_MODE={asked}: calls are captured in Python"
        return Check(name, "info", found)
    now = builder.state(environ)
    fine: dict[str, Check] = {
        "built": Check(name, "pass", f"mode native: {now.detail}"),
        "building": Check(name, "info", "it is being built; until then jobs use mode dispatcher"),
        "no torch": Check(name, "info", "there is no torch to build it for"),
    }
    wanting = {
        "no compiler": (
            f"there is no C++ compiler ({now.detail})",
            "install one or set CXX, then ",
        ),
        "failed": (now.detail, "see to that, then "),
        "missing": (
            f"{now.detail}; " * bool(now.detail)
            + "the first watched job builds it in the background for the next",
            "",
        ),
    }
    if now.name in fine:
        return fine[now.name]
    found, first = wanting[now.name]
    found = f"mode dispatcher: calls are captured in Python, at some ten times the cost; {found}"
    return Check(name, "warn", found, f"{first}{builder.COMMAND}, which takes about a minute")


def _variables(environ: Mapping[str, str]) -> Check:
    return (
        _unknown_variable(environ)
        or _bad_choice(environ)
        or _switch(environ)
        or Check("variables", "pass", "FAILSLOW is set: jobs started here are watched")
    )


def _unknown_variable(environ: Mapping[str, str]) -> Check | None:
    unknown = unknown_variables(environ)
    if not unknown:
        return None
    are, them = ("is", "it") if len(unknown) == 1 else ("are", "them")
    found = f"{', '.join(unknown)} {are} set, and nothing reads {them}"
    return Check("variables", "warn", found, "; ".join(unknown.values()))


def _bad_choice(environ: Mapping[str, str]) -> Check | None:
    for name, allowed in _CHOICES.items():
        if environ.get(name) and environ[name] not in allowed:
            found = f"{name}={environ[name]} is none of {', '.join(allowed)}"
            return Check("variables", "fail", found, f"set {name} to one of them, or unset it")
    return None


def _switch(environ: Mapping[str, str]) -> Check | None:
    """What makes FAILSLOW itself not do what one expects."""
    if "FAILSLOW" not in environ:
        found = "FAILSLOW is not set here: start jobs with FAILSLOW=1 or by failslow run"
        return Check("variables", "info", found)
    switch = environ["FAILSLOW"].strip().lower()
    if not switch or switch in OFF:
        found = f"FAILSLOW={environ['FAILSLOW']}: jobs started here are not watched"
        return Check("variables", "warn", found, "export FAILSLOW=1")
    if environ.get("FAILSLOW_AGENT", "").strip().lower() in OFF:
        found = f"FAILSLOW_AGENT={environ['FAILSLOW_AGENT']}: no agent is started, nobody reads"
        return Check("variables", "warn", found, "unset FAILSLOW_AGENT, unless you start agents")
    if environ.get("RANK") and "TORCHELASTIC_RUN_ID" not in environ:
        found = f"RANK={environ['RANK']} is set here: every Python with torch counts as a worker"
        return Check("variables", "warn", found, "unset RANK, unless this is a worker's shell")
    return None


def _settings(environ: Mapping[str, str]) -> Check:
    try:
        for stage, cls in config.stages().items():
            config.load_config(stage, cls, environ=environ)
    except FailslowError as error:
        return Check("settings", "fail", str(error), "correct it, or leave it out")
    file = environ.get("FAILSLOW_CONFIG")
    return Check("settings", "pass", f"from {file}" if file else "no settings file")


def _token(environ: Mapping[str, str]) -> Check:
    make = 'export FAILSLOW_TOKEN="$(openssl rand -hex 32)", the same on every node'
    if environ.get("FAILSLOW_TOKEN"):
        try:
            load_token(environ)
        except FailslowError as error:
            return Check("token", "fail", str(error), make)
        return Check("token", "pass", "FAILSLOW_TOKEN is set")
    nodes = nodes_of(environ)
    if nodes is not None and nodes > 1:
        found = f"a job of {nodes} nodes without FAILSLOW_TOKEN: its agents cannot trust each other"
        return Check("token", "fail", found, make)
    found = "not needed on one node; several nodes need FAILSLOW_TOKEN, the same on each"
    return Check("token", "pass", found)
