"""Whether a message bus carries messages here: a server, two ends, one message.

In: an address. Out: the seconds a signed message took, or a TransportError that says why none
came. For `failslow doctor`, which runs it as a process of its own, because a stopped store hangs
its clients; the address comes by the environment, since it may hold a password:

    $ FAILSLOW_TRANSPORT=tcpstore://127.0.0.1:0 python -m failslow.runtime.doctor.roundtrip
    {"seconds": 0.0123}
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time

from failslow.errors import FailslowError, TransportError
from failslow.runtime.transport import Endpoint, Limits, from_url

__all__ = ["main", "round_trip"]


def round_trip(url: str, *, timeout_s: float = 10.0) -> float:
    """Seconds from a publish to its arrival, connecting left out; `tcpstore` at port 0 is served
    here, every other address is connected to.

    Raises TransportError when nothing came within `timeout_s`, or what the transport raises.
    """
    server = None
    if url.startswith("tcpstore://") and url.endswith(":0"):
        from failslow.runtime.transport.tcpstore import serve

        server = serve(url)
        url = server.url
    job, token = f"doctor-{secrets.token_hex(8)}", secrets.token_hex(32)
    limits = Limits(interval_s=0.02, connect_s=timeout_s)
    try:
        with (
            Endpoint(from_url(url, limits), job=job, sender="doctor", token=token) as near,
            Endpoint(from_url(url, limits), job=job, sender="echo", token=token) as far,
        ):
            deadline_s = time.monotonic() + timeout_s
            near.publish("there", b"1")  # connects both, and subscribes the far end
            if not far.poll("there", timeout_s):
                raise _silence(near, timeout_s)
            begun_s = time.monotonic()
            near.publish("there", b"2")
            if not far.poll("there", max(0.1, deadline_s - time.monotonic())):
                raise _silence(near, timeout_s)
            return time.monotonic() - begun_s
    finally:
        if server is not None:
            server.close()


def _silence(end: Endpoint, timeout_s: float) -> TransportError:
    error = end.health().transport.last_error or "no answer"
    return TransportError(f"no message came within {timeout_s:g} s: {error}")


def main(url: str) -> int:
    """Print the result as JSON: {"seconds"} or {"error"}; returns the exit code."""
    try:
        # a store of our own takes its time on a busy machine, a server that is there does not
        patience_s = 15.0 if url.startswith("tcpstore:") else 5.0
        found: dict[str, object] = {"seconds": round_trip(url, timeout_s=patience_s)}
    except FailslowError as error:
        found = {"error": str(error)}
    print(json.dumps(found), flush=True)
    return int("error" in found)


def _end_with(parent: int) -> None:
    """A doctor that is killed ends nobody, and a stopped store would hold this process for good."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sys.exit(main(os.environ["FAILSLOW_TRANSPORT"]))
