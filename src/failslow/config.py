"""Validated settings, one class a stage. Precedence: argument > environment > file > default.

A setting `min_slowdown` of the detect stage is `--min-slowdown` on the command line,
`FAILSLOW_DETECT_MIN_SLOWDOWN` in the environment, and in a TOML file named by `--config` or
`FAILSLOW_CONFIG`:

    [detect]
    min_slowdown = 1.15
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from failslow.errors import ConfigError
from failslow.steering import SteerMode

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = [
    "DecideConfig",
    "DetectConfig",
    "LocalizeConfig",
    "RuntimeConfig",
    "StageConfig",
    "TelemetryConfig",
    "TrackConfig",
    "check_settings",
    "load_config",
    "load_decide",
    "stages",
]


class StageConfig(BaseModel):
    """Base of all stages' settings: frozen, unknown names, infinity and NaN refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DetectConfig(StageConfig):
    """How slow, for how long, before it is called a fail-slow (defaults: the paper, §4)."""

    min_slowdown: float = Field(1.10, gt=1.0, le=10.0)
    """An episode's median must be at least this many times the healthy level."""
    relief_slowdown: float = Field(1.05, gt=1.0, le=10.0)
    """Healthy again: the median is back within this factor of the healthy level."""
    suspect_iterations: int = Field(5, ge=2, le=1000)
    """Slow samples before a fail-slow is suspected."""
    min_duration_s: float = Field(10.0, ge=0.0)
    """Wall time the slowness must last before it is confirmed, in seconds."""
    min_iterations: int = Field(12, ge=2)
    """...and it must also have lasted as long as this many healthy iterations."""
    merge_gap_s: float = Field(30.0, ge=0.0)
    """Episodes closer than this, in seconds, are one (flapping)."""
    healthy_iteration_s: float = Field(0.0, ge=0.0)
    """What an iteration takes where all is well, in seconds, if known beforehand: a job may be slow
    from its start, or become so before its own healthy level is known. 0: learnt from the job."""
    change_probability: float = Field(0.9, gt=0.5, lt=1.0)
    """P(run length < k) above which a change point counts (the paper: 0.9)."""

    @model_validator(mode="after")
    def _check_order(self) -> DetectConfig:
        if self.relief_slowdown > self.min_slowdown:
            raise ValueError(
                f"relief_slowdown ({self.relief_slowdown}) must not exceed min_slowdown "
                f"({self.min_slowdown}); lower relief_slowdown or raise min_slowdown"
            )
        return self


class TrackConfig(StageConfig):
    """What following one worker's calls may take."""

    buffer_calls: int = Field(1 << 19, ge=1 << 10, le=1 << 24)
    """Calls kept while the period is searched, about 90 bytes each; a period of up to a fifth of
    it can be found."""


class RuntimeConfig(StageConfig):
    """How the agents and the controller of a job watch it."""

    poll_s: float = Field(0.1, ge=0.01, le=1.0)
    """An agent reads its workers' rings this often."""
    nice: int = Field(19, ge=-20, le=19)
    """Priority of agents and controller; only root may ask for one above the trainer's."""
    cores: str = ""
    """What agents and controller may run on, as in "0,2-3"; "" is all the machine's."""
    wait_s: float = Field(2.0, gt=0.0)
    """A job's iteration waits this long for a worker that does not report it, at least."""
    blind_after_s: float = Field(10.0, gt=0.0)
    """Silence of an agent, or of a worker's records, after which monitoring is called blind."""
    stall_after_s: float = Field(60.0, gt=0.0)
    """Time without any iteration or collective, and 20 usual iterations at least, after which a job
    is said to hang."""
    worker_interval_s: float = Field(1.0, gt=0.0)
    """A worker's own record is written this often at most..."""
    worker_records_per_s: float = Field(100.0, gt=0.0)
    """...and of all workers together so many a second."""
    update_s: float = Field(10.0, gt=0.0)
    """An ongoing episode's lost time is written this often."""


class TelemetryConfig(StageConfig):
    """How often the agents sample processors, GPUs and networks."""

    interval_s: float = Field(1.0, ge=0.05, le=60.0)
    """Seconds between samples of everything; ten minutes of them are kept."""
    record_s: float = Field(0.0, ge=0.0, le=60.0)
    """Put all of them into the journal, so often; 0: only what a verdict asks for."""


class LocalizeConfig(StageConfig):
    """How much the search for a culprit may cost. Training is paused in no mode but advise, auto.

    (Whether it may be paused at all is the mode of the stage decide.)
    """

    reference: bool = True
    """Benchmark the healthy workers once at start-up, in a pause of a few seconds."""
    pause_limit_s: float = Field(5.0, gt=0.0, le=60.0)
    """What a pause may take with its benchmarks, from the last worker's arrival on..."""
    ready_timeout_s: float = Field(4.0, gt=0.0, le=60.0)
    """...and what a worker waits at most for the others, and for the word to begin."""
    prepare_timeout_s: float = Field(30.0, gt=0.0, le=600.0)
    """From the order to prepare a pause to all workers being at the boundary; longer where their
    calls are that far apart."""
    silence_s: float = Field(1.5, gt=0.0, le=10.0)
    """A worker waits for no agent that has been silent for so long."""
    pauses_per_hour: int = Field(6, ge=0)
    """Pauses, those that came to nothing included; the reference is not counted."""
    max_pause_share: float = Field(0.01, gt=0.0, le=1.0)
    """Share of an hour's time that pauses may take together."""
    pause_attempts: int = Field(3, ge=1, le=10)
    """Boundaries tried before a pause is given up for this time."""
    recheck_s: float = Field(60.0, gt=0.0)
    """A culprit is put to the proof again after so long, then after twice as long, and so on."""
    gemm_size: int | None = Field(None, ge=16, le=65_536)
    """Rows and columns of the benchmark's matrices; None: by the device."""
    gemm_dtype: str | None = None
    """Name of torch's type of their elements; None: by the device."""
    gemm_repeats: int | None = Field(None, ge=1, le=1000)
    """Timed products; None: by the device."""
    p2p_sizes_bytes: tuple[int, ...] | None = None
    """Messages sent over each link; None: by the device (GPU: 16, 32 and 64 MB)."""
    p2p_repeats: int | None = Field(None, ge=1, le=100)
    """Timed messages of each size; None: by the device."""

    @field_validator("p2p_sizes_bytes", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """The environment has them as "16000000,32000000"."""
        return value.split(",") if isinstance(value, str) else value

    @field_validator("p2p_sizes_bytes")
    @classmethod
    def _check_sizes(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and not all(0 < size <= 1 << 30 for size in value):
            raise ValueError("must be sizes of 1 to 1073741824 bytes each")
        return value


class DecideConfig(StageConfig):
    """When what is done about a fail-slow; costs are estimates until measured ones replace them."""

    mode: SteerMode = "observe"
    """observe: nothing is decided · advise: plans are printed · auto: plans are carried out."""
    redistribute_cost_s: float = Field(1.0, ge=0.0)
    """Seconds it costs to go to S2..."""
    topology_cost_s: float = Field(15.0, ge=0.0)
    """...to S3, pause and slow first iteration included..."""
    restart_cost_s: float = Field(600.0, ge=0.0)
    """...and to S4: checkpoint, restart, and the iterations done again."""
    horizon_s: float = Field(600.0, ge=0.0)
    """A fault is expected to last so long from now, or as long as it has lasted already if that is
    more: S3 is refused where it saves less in that time than it costs."""
    min_gain: float = Field(0.05, gt=0.0, lt=1.0)
    """A plan must make iterations faster by this share, or the one in force stays."""
    min_slowdown: float = Field(1.10, gt=1.0, le=10.0)
    """A culprit is slow (again) from this many times its healthy time..."""
    relief_slowdown: float = Field(1.05, gt=1.0, le=10.0)
    """...and has recovered once it has stayed within this factor of it..."""
    relief_hold_s: float = Field(30.0, ge=0.0)
    """...for so long; twice as long each time it came back soon after."""
    memory_s: float = Field(1800.0, ge=0.0)
    """What was lost and learned is kept for so long after relief: a flapping fault is one fault."""
    allow_restart: bool = False
    """S4 may be decided; without it, it is not even advice."""
    slurm: Literal["off", "drain", "requeue"] = "off"
    """What is done in a Slurm job at S4. off: commands are shown · drain: the nodes left out are
    drained, the job goes on with its others · requeue: and it is requeued, to start on others."""
    confirmations: int = Field(2, ge=1)
    """Verdicts that must name the same culprit before S4."""
    max_evictions: int = Field(1, ge=0)
    """Hosts a job may lose to S4 altogether."""
    spares: int = Field(0, ge=0)
    """Hosts that wait to take the place of one lost to S4."""
    max_failures: int = Field(2, ge=1)
    """A level is given up for the culprits of the time after so many failures."""
    trust: float = Field(1.0, gt=0.0, le=1.0)
    """How far the history of durations may move the thresholds: by up to 1 / trust; 1 = not."""

    @model_validator(mode="after")
    def _check_order(self) -> DecideConfig:
        if self.relief_slowdown > self.min_slowdown:
            raise ValueError(
                f"relief_slowdown ({self.relief_slowdown}) must not exceed min_slowdown "
                f"({self.min_slowdown}); lower relief_slowdown or raise min_slowdown"
            )
        return self


C = TypeVar("C", bound=StageConfig)


def load_config(
    stage: str,
    cls: type[C],
    *,
    arguments: Mapping[str, Any] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    short: Mapping[str, str] | None = None,
) -> C:
    """Settings of `stage` from arguments (None = not given), environment, file and defaults.

    short: variables of the environment that outrank a setting's usual one, by its name.
    Raises ConfigError naming the setting, its value and where it came from.
    """
    environ = os.environ if environ is None else environ
    if file is None and environ.get("FAILSLOW_CONFIG"):
        file = Path(environ["FAILSLOW_CONFIG"])
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if file is not None:
        for name, value in _read_stage(file, stage).items():
            values[name], origin[name] = value, f"[{stage}] in {file}"
    for name in cls.model_fields:
        variable = f"FAILSLOW_{stage}_{name}".upper()
        if variable in environ:
            values[name], origin[name] = environ[variable], f"${variable}"
    for name, variable in (short or {}).items():
        if environ.get(variable):
            values[name], origin[name] = environ[variable], f"${variable}"
    for name, value in (arguments or {}).items():
        if value is not None:
            # options leave the unit out: min_duration_s is --min-duration
            flag = name.removesuffix("_s").replace("_", "-")
            values[name], origin[name] = value, f"--{flag}"
    try:
        return cls(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        where = origin.get(name, "the settings")
        message = first["msg"].removeprefix("Value error, ")
        given = f"{name} = {values[name]!r} " if name in values else ""
        raise ConfigError(f"{given}from {where}: {message}") from None


def load_decide(environ: Mapping[str, str]) -> DecideConfig:
    """Of a live job: FAILSLOW_MODE is short for FAILSLOW_DECIDE_MODE. Raises ConfigError."""
    return load_config("decide", DecideConfig, environ=environ, short={"mode": "FAILSLOW_MODE"})


def check_settings(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where agents and controller of a job would refuse their settings."""
    load_decide(environ)
    for stage, cls in stages().items():
        load_config(stage, cls, environ=environ)


def stages() -> dict[str, type[StageConfig]]:
    """The settings class of each stage, by the name of its table."""
    return {
        name.removesuffix("Config").lower(): cls
        for name, cls in globals().items()
        if name.endswith("Config")
        and isinstance(cls, type)
        and issubclass(cls, StageConfig)
        and cls is not StageConfig
    }


def _read_stage(file: Path, stage: str) -> dict[str, Any]:
    try:
        with file.open("rb") as handle:
            tables = tomllib.load(handle)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read the settings file {file}: byte {error.start} is not UTF-8; save it as "
            "UTF-8 text"
        ) from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the settings file {file}: {error}") from None
    known = stages()
    for name in tables:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean [{near[0]}]?" if near else "settings stand in tables"
            raise ConfigError(
                f"{file}: {name!r} is no stage's table ({', '.join(known)}); {remedy}"
            )
    table = tables.get(stage, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: [{stage}] must be a table of settings, not {table!r}")
    return table
