"""Real faults on demand, each undone whatever happens: cpu, throttle, link, flood.

In: a process, cores or a network namespace of this machine. Out: the fault inside a `with` block:

    >>> with throttle(4711, to=0.7):                                     # doctest: +SKIP
    ...     watch_the_job()

A guard process in a session of its own undoes it after the block, an exception, Ctrl-C, SIGTERM or
SIGKILL. Linux only; standard library only. The command line is `failslow inject --help`.
"""

from __future__ import annotations

from collections.abc import Sequence

from failslow.errors import InjectError
from failslow.inject.burn import Burn, parse_cores
from failslow.inject.congest import Congest
from failslow.inject.flood import Flood
from failslow.inject.injection import Injection, undo_leftovers
from failslow.inject.namespaces import find_place, namespace_path, parse_rate_bits
from failslow.inject.throttle import Throttle

__all__ = [
    "Burn",
    "Congest",
    "Flood",
    "Injection",
    "Throttle",
    "burn",
    "congest",
    "find_place",
    "flood",
    "parse_cores",
    "parse_rate_bits",
    "throttle",
    "undo_leftovers",
]


def throttle(
    pid: int,
    *,
    to: float,
    threads: int = 1,
    method: str = "auto",
    for_s: float | None = None,
) -> Injection:
    """Leave process `pid` the fraction `to` of its speed (0.01 to below 1).

    threads: how many it computes with; the quota is `to * threads` cores. method: "cgroup",
    "signal" (SIGSTOP and SIGCONT), or "auto", the first that works. Entering raises InjectError.
    """
    return Injection(Throttle(pid, to, threads, method), for_s=for_s)


def burn(
    cores: Sequence[int],
    *,
    load: float = 1.0,
    beside: int | None = None,
    for_s: float | None = None,
) -> Injection:
    """Keep `cores` busy with one pinned process each, for the share `load` of the time.

    beside: a pid whose control group the processes join, to weigh as much as it does. Entering
    raises InjectError.
    """
    return Injection(Burn(tuple(cores), load, beside), for_s=for_s)


def congest(
    namespace: str | None,
    interface: str,
    rate_mbit: float,
    *,
    dst: str | None = None,
    force: bool = False,
    for_s: float | None = None,
) -> Injection:
    """Limit what leaves `interface` to `rate_mbit` Mbit/s, or only what goes to address `dst`.

    namespace: a name of `ip netns`, "pid:4711", a path, or None for the current one, which must
    not be the machine's own unless `force`. Raises InjectError for an unknown namespace.
    """
    rate_bits = round(rate_mbit * 1e6)
    return Injection(Congest(_path(namespace), interface, rate_bits, dst, force), for_s=for_s)


def flood(
    source: str | None,
    sink: str | None,
    *,
    address: str | None = None,
    rate_mbit: float | None = None,
    streams: int = 4,
    protocol: str = "tcp",
    force: bool = False,
    for_s: float | None = None,
) -> Injection:
    """Send TCP or UDP from namespace `source` to namespace `sink`, as fast as the path takes.

    address: of the sink, where its namespace has several or `sink` is the current one (None).
    rate_mbit: a limit over all streams. Namespaces as in `congest`. Raises InjectError.
    """
    if address is None:
        if sink is None:
            raise InjectError("where should the flood go? name a namespace or an address")
        address = find_place(sink).address
        if address is None:
            raise InjectError(f"{sink} has no address; give one to its interface")
    fault = Flood(
        _path(source),
        _path(sink),
        address,
        rate_bits=0 if rate_mbit is None else round(rate_mbit * 1e6),
        streams=streams,
        protocol=protocol,
        force=force,
    )
    return Injection(fault, for_s=for_s)


def _path(namespace: str | None) -> str | None:
    """Raises InjectError for a namespace that is not there."""
    if namespace is None:
        return None
    path = namespace_path(namespace)
    if path is None:
        raise InjectError(f"no network namespace {namespace!r}; `ip netns` lists them")
    return path
