"""The command line's beginning: `failslow`, or `python -m failslow` without its script on the path.

In: arguments. Out: an exit code. The commands' imports take a moment, and Ctrl-C during them is no
reason for a traceback either: it is 130, as later.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the `failslow` command."""
    try:
        from failslow.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
