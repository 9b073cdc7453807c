"""A simulated job as a readable script, or a file.

In: calls, or YAML or TOML. Out: a checked `Scenario`.

    Scenario().slow_device(rank=3, from_s=200, for_s=600, factor=1.4).flap(node=1, from_s=900, ...)

    name: one slow GPU
    iterations: 2000
    cluster: {groups: [{nodes: 2, device: H800, tflops: 990}]}
    workload: {layers: 16, hidden: 2048, tp: 2, pp: 2, dp: 4, micro_batches: 16}
    faults:
      - {kind: slow_device, rank: 3, from_s: 200, for_s: 600, factor: 1.4}
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from failslow.config import StageConfig
from failslow.errors import ConfigError, InputError
from failslow.simulate.cluster import Cluster
from failslow.simulate.faults import (
    AnyFault,
    Congest,
    CpuContention,
    Flap,
    SlowDevice,
    Thermal,
)
from failslow.simulate.noise import Noise
from failslow.simulate.workload import Workload

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = ["Scenario", "load_scenario"]

_TAGS = frozenset({"slow_device", "thermal", "cpu_contention", "congest", "flap"})


class Scenario(StageConfig):
    """A job on a cluster, its noise, and what goes wrong. Times count from the job's start."""

    name: str = "scenario"
    cluster: Cluster = Cluster()
    workload: Workload = Workload()
    iterations: int = Field(1000, ge=1, le=10_000_000)
    seed: int = Field(0, ge=0)
    noise: Noise = Noise()
    checkpoint_every: int = Field(0, ge=0)
    """Iterations between checkpoints; 0 for none."""
    checkpoint_s: float = Field(5.0, ge=0)
    placement: tuple[int, ...] = ()
    """The node at each position of the job, () as they are numbered; faults name real nodes and
    devices, wherever the job has them."""
    split: tuple[int, ...] = ()
    """Micro-batches of each replica, () for `workload.micro_batches` each; all together as many."""
    faults: tuple[AnyFault, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Scenario:
        w, c = self.workload, self.cluster
        if w.ranks != c.ranks:
            raise ValueError(
                f"the workload needs tp · cp · dp · pp = {w.tp} · {w.cp} · {w.dp} · {w.pp} = "
                f"{w.ranks} devices, but the cluster has {c.ranks} ({c.nodes} nodes of "
                f"{c.devices_per_node}); change one of them"
            )
        if w.tp > c.devices_per_node or c.devices_per_node % w.tp:
            raise ValueError(
                f"tp ({w.tp}) must divide the devices of a node ({c.devices_per_node})"
            )
        small, large = sorted((w.ranks_per_worker, c.devices_per_node))
        if large % small:
            raise ValueError(
                f"tp · cp ({w.ranks_per_worker}) must divide the devices of a node "
                f"({c.devices_per_node}), or be a multiple of them"
            )
        if self.placement and sorted(self.placement) != list(range(c.nodes)):
            raise ValueError(f"placement must name each of the cluster's {c.nodes} nodes once")
        if self.split:
            self._check_split()
        for number, fault in enumerate(self.faults):
            problem = fault.misplaced(c)
            if problem:
                raise ValueError(f"faults[{number}] ({fault.kind}): {problem}")
        return self

    def _check_split(self) -> None:
        w, total = self.workload, sum(self.split)
        if len(self.split) != w.dp or total != w.dp * w.micro_batches or min(self.split) < 1:
            raise ValueError(
                f"split gives {len(self.split)} replicas {total} micro-batches; it must give dp "
                f"({w.dp}) replicas one each at least and dp · micro_batches "
                f"({w.dp * w.micro_batches}) in all"
            )
        if w.schedule == "interleaved" and any(m % w.pp for m in self.split):
            raise ValueError(f'schedule "interleaved" needs a split in multiples of pp ({w.pp})')

    def but(self, **changes: Any) -> Scenario:
        """This scenario with other settings, checked anew. Raises ConfigError."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return _checked({**values, **changes}, "the scenario", ConfigError)

    def slow_device(
        self, *, rank: int, from_s: float, factor: float, for_s: float | None = None
    ) -> Scenario:
        """...in which a device is `factor` times slower from `from_s` on, for `for_s`."""
        return self._with(SlowDevice, rank=rank, from_s=from_s, for_s=for_s, factor=factor)

    def thermal(
        self,
        *,
        from_s: float,
        factor: float,
        node: int | None = None,
        rank: int | None = None,
        for_s: float | None = None,
        ramp_s: float = 300.0,
    ) -> Scenario:
        """...in which a node, or one device, heats up over `ramp_s` until it is throttled."""
        return self._with(
            Thermal,
            node=node,
            rank=rank,
            from_s=from_s,
            for_s=for_s,
            factor=factor,
            ramp_s=ramp_s,
        )

    def cpu_contention(
        self, *, node: int, from_s: float, factor: float, for_s: float | None = None
    ) -> Scenario:
        """...in which neighbours take the CPUs of a node."""
        return self._with(CpuContention, node=node, from_s=from_s, for_s=for_s, factor=factor)

    def congest(
        self,
        *,
        from_s: float,
        factor: float,
        node: int | None = None,
        link: tuple[int, int] | None = None,
        leaf: int | None = None,
        for_s: float | None = None,
    ) -> Scenario:
        """...in which traffic of a node, from a node to another, or of a leaf is slow."""
        return self._with(
            Congest, node=node, link=link, leaf=leaf, from_s=from_s, for_s=for_s, factor=factor
        )

    def flap(
        self,
        *,
        from_s: float,
        factor: float,
        period_s: float = 60.0,
        duty: float = 0.5,
        node: int | None = None,
        link: tuple[int, int] | None = None,
        leaf: int | None = None,
        for_s: float | None = None,
    ) -> Scenario:
        """...in which such traffic is slow for `duty` of every `period_s`."""
        return self._with(
            Flap,
            node=node,
            link=link,
            leaf=leaf,
            from_s=from_s,
            for_s=for_s,
            factor=factor,
            period_s=period_s,
            duty=duty,
        )

    def _with(self, kind: type[AnyFault], **values: Any) -> Scenario:
        fault = _checked_fault(kind, values)
        return self.but(faults=(*self.faults, fault))


def load_scenario(path: str | Path) -> Scenario:
    """The scenario in a YAML or TOML file (by its name's ending).

    Raises InputError (one line: file, setting, what is wrong with it).
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            values = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = yaml.safe_load(text)
        else:
            raise InputError(f"{path}: no scenario by its name; it must end in .yaml or .toml")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"{path}: cannot be read: {reason}; give a scenario file") from None
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: a scenario is a table of settings, not {type(values).__name__}")
    values.setdefault("name", path.stem)
    return _checked(values, str(path), InputError)


def _checked(
    values: dict[str, Any], where: str, error_type: type[ConfigError | InputError]
) -> Scenario:
    try:
        return Scenario(**values)
    except ValidationError as error:
        raise error_type(f"{where}: {_first(error)}") from None


def _checked_fault(kind: type[AnyFault], values: dict[str, Any]) -> AnyFault:
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(f"{kind.__name__}: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """The first problem as "faults[0].factor (0.5): Input should be greater than 1"."""
    first = error.errors()[0]
    name = ""
    for part in first["loc"]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in _TAGS:  # which kind of fault it is stands in the file already
            name += f".{part}" if name else part
    message = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    if not name:
        return message
    shown = f" ({given!r})" if isinstance(given, (str, int, float, bool)) else ""
    return f"{name}{shown}: {message}"
