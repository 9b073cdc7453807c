"""The command line, thin: parse, call, print. `failslow --help` lists the commands.

In: arguments. Out: results on stdout, everything else on stderr, and an exit code:
0 healthy or done, 1 bad usage or input, 3 a fail-slow found (`--fail-on-slow`).
"""

from __future__ import annotations

from failslow.cli.app import app, main

__all__ = ["app", "main"]
