"""An agent's way to the controller, wherever that is at the moment.

In: messages at any time. Out: an `Endpoint` made in a thread (torch takes seconds to import), and
made anew when the address changes; until then messages wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from failslow.errors import FailslowError
from failslow.runtime.security import Message
from failslow.runtime.transport import MAX_PAYLOAD_BYTES, Endpoint
from failslow.runtime.transport.base import check_size

__all__ = ["Bus"]

_WAITING = 4096
_LOOK_S = 1.0
_START_S = 20.0
"""A controller may take so long to come up; its silence counts from then on."""


class Bus:
    """locate: the address at the moment, None while there is none. connect: makes an endpoint of
    it. error: why there may be no address. Nothing here blocks or raises because of a server.
    """

    def __init__(
        self,
        locate: Callable[[], str | None],
        connect: Callable[[str], Endpoint],
        *,
        error: str = "the controller has not said where it is",
    ) -> None:
        self._locate, self._connect = locate, connect
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, bytes]] = deque(maxlen=_WAITING)
        self._endpoint: Endpoint | None = None
        self._url = ""
        self._looked_s = -_LOOK_S
        self._making = False
        self._since_s = time.monotonic()
        self._error = error

    @property
    def ready(self) -> bool:
        """There was a controller, and what connects to it is loaded."""
        return self._endpoint is not None

    def publish(self, topic: str, payload: bytes) -> None:
        """Send, or keep until there is somebody to send to; the oldest give way.

        Raises MessageTooLargeError, whether there is somebody or not.
        """
        check_size(topic, len(payload), MAX_PAYLOAD_BYTES)
        with self._lock:
            if self._endpoint is None:
                self._waiting.append((topic, payload))
            else:
                self._endpoint.publish(topic, payload)

    def poll(self, topic: str) -> list[Message]:
        """What has come on `topic`."""
        endpoint = self._endpoint
        return [] if endpoint is None else endpoint.poll(topic, 0.0)

    def tend(self) -> None:
        """Look where the controller is; to be called often."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S or self._making:
            return
        self._looked_s = now_s
        url = self._locate()
        if url is None or url == self._url:
            return
        self._url, self._making = url, True
        threading.Thread(target=self._make, args=(url,), name="failslow bus", daemon=True).start()

    def outage(self) -> tuple[float, str]:
        """Seconds since the controller's bus last answered, and why; (0, "") when it does."""
        with self._lock:
            endpoint = self._endpoint
            if endpoint is None:
                silent_s = time.monotonic() - self._since_s - _START_S
                return max(0.0, silent_s), self._error
        health = endpoint.health().transport
        return health.outage_s, health.last_error if health.outage_s else ""

    def close(self, linger_s: float) -> None:
        """Send what waits, for at most `linger_s`."""
        with self._lock:
            endpoint = self._endpoint
        if endpoint is not None:
            endpoint.close(linger_s)

    def _make(self, url: str) -> None:
        try:
            endpoint = self._connect(url)
        except Exception as error:  # torch, for one, may not be importable at all
            told = str(error) if isinstance(error, FailslowError) else repr(error)
            self._error, self._url = told, ""
        else:
            with self._lock:
                old, self._endpoint = self._endpoint, endpoint
                while self._waiting:
                    endpoint.publish(*self._waiting.popleft())
            if old is not None:
                old.close(0.0)
        finally:
            self._making = False
