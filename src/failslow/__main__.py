"""`python -m failslow`: the command line without its script on the path."""

from __future__ import annotations

from failslow.cli import main

if __name__ == "__main__":
    main()
