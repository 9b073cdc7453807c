"""When a collective that was only enqueued is really complete; asked for while profiling only.

(On the CPU the extension of native.py reports completions itself, always.)

In: the Work of a call, and what was marked before it. Out: `done(call, start_ns, end_ns)`:
on the CPU `end_ns` by this host's clock and `start_ns` 0; on a GPU both by the device, moved to
the host's clock. A host that enqueues returns long before the transfer ends: the time inside
the call is never a duration.

A CPU backend runs a future's callback when it is done (gloo: all but send, recv and
reduce-scatter, which tell only a caller that waits). On CUDA an event before the call and one
in the future's callback, which runs on a stream that waits for the collective, bracket it; a
thread that sleeps while nothing is pending asks the events. Not run on GPUs yet: tested with
a stand-in for the device's clock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from failslow.capture.device import current_device

__all__ = ["Completions", "CudaClock", "DeviceClock"]

_PERIOD_S = 0.001
_PATIENCE_NS = 10_000_000_000
_PENDING = 1024


class DeviceClock(Protocol):
    """Marks moments in the order of the device's work."""

    def about(self) -> dict[str, str]:
        """Which device: its id and its model (`capture.device`)."""
        ...

    def mark(self) -> Any:
        """An event at the end of the work queued so far; None where none may be recorded."""
        ...

    def reached(self, event: Any) -> bool:
        """Whether the device has come to it."""
        ...

    def elapsed_ns(self, earlier: Any, later: Any) -> int:
        """Device time between two events that were reached."""
        ...


class CudaClock:
    """CUDA events on the current stream; none while a graph is being captured."""

    def about(self) -> dict[str, str]:
        return current_device()

    def mark(self) -> Any:
        import torch

        if torch.cuda.is_current_stream_capturing():
            return None
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        event.record()
        return event

    def reached(self, event: Any) -> bool:
        return bool(event.query())

    def elapsed_ns(self, earlier: Any, later: Any) -> int:
        return int(earlier.elapsed_time(later) * 1e6)


class Completions:
    """Follows calls to their end. `stop` before the interpreter ends."""

    def __init__(
        self,
        done: Callable[[Any, int, int], None],
        device: DeviceClock,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """done: called with the call's own token, from any thread, and must not raise."""
        self._done = done
        self._device = device
        self._now = now
        self._pending: deque[Callable[[], bool]] = deque(maxlen=_PENDING)
        self._anchor: Any = None
        self._anchor_ns = 0
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> Any:
        """To be called just before a collective on a device: what `follow` wants back."""
        if self._anchor is None:
            self._anchor = self._device.mark()
            if self._anchor is not None:
                self._poll(self._anchored)
        return self._device.mark()

    def follow(self, call: Any, work: Any, begun: Any, *, on_cpu: bool, polls: bool) -> None:
        """Report `call` once `work` is complete.

        polls: where the backend offers no future, its `is_completed` can be believed.
        """
        try:
            future = work.get_future()
        except RuntimeError:  # not offered for this collective
            future = None
        if on_cpu:
            if future is not None:
                future.add_done_callback(lambda _: self._done(call, 0, self._now()))
            elif polls:
                self._poll(self._completed(call, work))
        elif future is not None and begun is not None:
            future.add_done_callback(lambda _: self._enqueued(call, begun))

    def stop(self) -> None:
        """End the thread; calls still pending stay unreported."""
        self._stopping.set()
        self._wake.set()
        self._pending.clear()
        if self._thread is not None:
            self._thread.join(1.0)

    def _enqueued(self, call: Any, begun: Any) -> None:
        ended = self._device.mark()
        if ended is not None:
            self._poll(self._bracketed(call, begun, ended))

    def _anchored(self) -> bool:
        if self._device.reached(self._anchor):
            self._anchor_ns = self._now()
            return True
        return False

    def _bracketed(self, call: Any, begun: Any, ended: Any) -> Callable[[], bool]:
        def finished() -> bool:
            # the anchor comes first in the queue, so its time is known by then
            if not self._anchor_ns or not self._device.reached(ended):
                return False
            start = self._anchor_ns + self._device.elapsed_ns(self._anchor, begun)
            self._done(call, start, start + self._device.elapsed_ns(begun, ended))
            return True

        return finished

    def _completed(self, call: Any, work: Any) -> Callable[[], bool]:
        deadline = self._now() + _PATIENCE_NS

        def finished() -> bool:
            if work.is_completed():
                self._done(call, 0, self._now())
                return True
            return self._now() > deadline

        return finished

    def _poll(self, finished: Callable[[], bool]) -> None:
        self._pending.append(finished)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="failslow", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._pending:
                self._wake.wait()
                self._wake.clear()
                continue
            for _ in range(len(self._pending)):
                finished = self._pending.popleft()
                if not finished():
                    self._pending.append(finished)
            self._stopping.wait(_PERIOD_S)
