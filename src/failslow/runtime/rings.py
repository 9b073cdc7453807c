"""Finds the rings of one start of a job among those of its name. Standard library only.

In: the folder of rings, and where this process's own worker comes from. Out: paths.

    OwnRings("exp1", environ, [Origin.of(environ)])()  # -> [Path("/dev/shm/failslow-0-exp1-r0-…")]
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from failslow.capture.origin import Origin, kin
from failslow.capture.ring import find_rings, read_about
from failslow.runtime.claim import parse_claims

__all__ = ["OwnRings"]


class OwnRings:
    """Called: the rings of the job's workers here, ordered by name.

    origins: where workers known to be of it come from; without any the name must do.
    """

    def __init__(self, job: str, environ: Mapping[str, str], origins: Iterable[Origin]) -> None:
        self.job = job
        self._environ, self._origins = environ, frozenset(origins)
        self._known: dict[tuple[Path, int], Origin | None] = {}

    @classmethod
    def given(cls, environ: Mapping[str, str]) -> OwnRings:
        """Of the worker that started this process."""
        origin = environ.get("FAILSLOW_ORIGIN")
        origins = [Origin.parse(origin)] if origin else []
        return cls(environ["FAILSLOW_JOB"], environ, origins)

    @classmethod
    def of_run(cls, folder: Path | None, job: str, environ: Mapping[str, str]) -> OwnRings:
        """Of those who claim a run folder; of all called `job` where nobody does."""
        claims = []
        if folder is not None:
            with contextlib.suppress(OSError):
                claims = parse_claims((folder / "claims").read_text())
        origins = [Origin.parse(claim.origin) for claim in claims]
        return cls(claims[-1].job if claims else job, environ, origins)

    @property
    def namesakes(self) -> list[Path]:
        """The rings of other jobs of that name."""
        ours = set(self())
        return [path for path in find_rings(self.job, self._environ) if path not in ours]

    def __call__(self) -> list[Path]:
        paths = find_rings(self.job, self._environ)
        if not self._origins:
            return paths
        known, self._known = self._known, {}
        for path in paths:
            with contextlib.suppress(OSError):  # it ended meanwhile
                file = (path, path.stat().st_ino)
                self._known[file] = known[file] if file in known else _origin(path)
        ours = kin(self._origins, (origin for origin in self._known.values() if origin))
        return [p for (p, _), origin in self._known.items() if origin is None or origin in ours]


def _origin(path: Path) -> Origin | None:
    """None where it does not say: whoever reads it will tell what is wrong with it."""
    text = read_about(path).get("origin")
    return Origin.parse(text) if isinstance(text, str) else None
