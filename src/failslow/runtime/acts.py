"""How a person overrides a job's policy: one small file in the run's folder.

In: `failslow act S2`. Out: `orders.json` beside the journal, which the controller takes and removes
once a second, and answers with an `action` line in the journal:

    {"id":"9f3c…","order":"S2","by":"ada"}
    {"t":…,"kind":"action","what":"act","id":"9f3c…","order":"S2","by":"ada"}

Whoever may write into that folder may give orders: a file that belongs to another user than the
controller's (or root) is not read. A job on a shared folder takes orders from any of its machines.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
from pathlib import Path
from typing import Any

from failslow.errors import InputError

__all__ = ["ORDERS", "take_order", "waiting", "withdraw", "write_order"]

ORDERS = ("S2", "S3", "S4", "resume", "ignore")
"""Those of `records.Command`."""
_FILE = "orders.json"
_MAX_BYTES = 4096


def write_order(folder: Path, order: str) -> str:
    """Leave an order for the controller; its id. Raises InputError when one waits, or none can."""
    path = folder / _FILE
    if path.exists():
        raise InputError(
            f"{path}: another order waits there; if the job has ended, remove that file"
        )
    number = secrets.token_hex(8)
    draft = folder / f".{_FILE}.{number}"
    text = json.dumps({"id": number, "order": order, "by": _user()})
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)
        draft.replace(path)  # in one step: the controller never sees half an order
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise InputError(
            f"{folder}: the order cannot be left there: {error.strerror or error}; give it as the "
            "user who runs the job"
        ) from None
    return number


def take_order(folder: Path) -> dict[str, Any] | None:
    """The order that waits, removed; None when there is none that may be followed."""
    path = folder / _FILE
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        owner = os.fstat(handle).st_uid
        text = os.read(handle, _MAX_BYTES)
    except OSError:
        return None
    finally:
        os.close(handle)
    with contextlib.suppress(OSError):
        path.unlink()
    if owner not in (os.geteuid(), 0):
        return None
    try:
        order = json.loads(text)
    except ValueError:
        return None
    if not isinstance(order, dict) or order.get("order") not in ORDERS:
        return None
    return {name: str(order.get(name, "")) for name in ("id", "order", "by")}


def waiting(folder: Path, number: str) -> bool:
    """Whether the order with this id was not taken yet."""
    try:
        return number in (folder / _FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def withdraw(folder: Path, number: str) -> None:
    """Take the order back if it still waits."""
    if waiting(folder, number):
        with contextlib.suppress(OSError):
            (folder / _FILE).unlink()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())
