"""What a settings file may hold, and what is said of one that holds something else."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from failslow.config import DetectConfig, StageConfig, load_config, load_decide, stages
from failslow.demo.drill import SETTINGS
from failslow.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "settings.md"


def load(text: bytes | str, folder: Path) -> DetectConfig:
    file = folder / "failslow.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config("detect", DetectConfig, file=file, environ={})


def test_a_stage_reads_its_own_table(tmp_path: Path) -> None:
    text = "[detect]\nmin_slowdown = 1.2\n[runtime]\npoll_s = 0.5\n"
    assert load(text, tmp_path).min_slowdown == 1.2
    assert load("", tmp_path) == DetectConfig()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# caf\N{LATIN SMALL LETTER E WITH ACUTE}".encode("latin-1"), "byte 5 is not UTF-8"),
        ("[detct]\nmin_slowdown = 1.2\n", r"'detct' is no stage's table .*; did you mean \[detect"),
        ("min_slowdown = 1.2\n", "'min_slowdown' is no stage's table .*; settings stand in tables"),
        ("detect = 3\n", "must be a table of settings, not 3"),
        ("[detect]\nmin_duration_s = inf\n", r"min_duration_s = inf from \[detect\].* finite"),
        ("[detect]\nmin_slowdown = nan\n", r"min_slowdown = nan from \[detect\].* finite"),
        ("[detect\n", "cannot read the settings file"),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_and_where(
    text: bytes | str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(text, tmp_path)
    assert "\n" not in str(caught.value)
    assert "failslow.toml" in str(caught.value)


def test_every_stages_settings_have_a_table() -> None:
    assert {"detect", "track", "runtime", "decide"} <= set(stages())
    assert stages()["detect"] is DetectConfig


def test_infinity_is_refused_from_the_command_line_and_the_environment() -> None:
    with pytest.raises(ConfigError, match=r"inf from --min-duration: .*finite"):
        load_config("detect", DetectConfig, arguments={"min_duration_s": float("inf")}, environ={})
    with pytest.raises(ConfigError, match=r"'inf' from \$FAILSLOW_DETECT_MIN_DURATION_S"):
        load_config("detect", DetectConfig, environ={"FAILSLOW_DETECT_MIN_DURATION_S": "inf"})


def test_a_live_jobs_mode_has_a_short_name_that_outranks_the_long_one() -> None:
    environ = {"FAILSLOW_DECIDE_MODE": "auto", "FAILSLOW_MODE": "advise"}
    assert load_decide(environ).mode == "advise"
    assert load_decide(environ | {"FAILSLOW_MODE": ""}).mode == "auto"
    with pytest.raises(ConfigError, match=r"mode = 'foo' from \$FAILSLOW_MODE: "):
        load_decide(environ | {"FAILSLOW_MODE": "foo"})


def loaded(text: str, folder: Path) -> dict[str, StageConfig]:
    """Every stage's settings, of a file with `text`."""
    file = folder / "failslow.toml"
    file.write_text(text)
    return {name: load_config(name, cls, file=file, environ={}) for name, cls in stages().items()}


def test_the_page_of_settings_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    written = runpy.run_path(str(ROOT / "scripts" / "make_settings.py"))["page"](text)
    assert text == written, "python scripts/make_settings.py brings it up to date"
    for stage, cls in stages().items():
        for name in cls.model_fields:
            assert f"| `{name}` | `FAILSLOW_{stage.upper()}_{name.upper()}` |" in text


def test_the_printed_settings_files_are_taken(tmp_path: Path) -> None:
    example, trial = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert loaded(example, tmp_path)["decide"].model_dump()["mode"] == "auto"
    short = {
        name: load_config(name, cls, environ=SETTINGS) for name, cls in stages().items()
    }  # the demonstration's
    assert loaded(trial, tmp_path) == short
    defaults = {name: cls() for name, cls in stages().items()}
    assert short != defaults
