"""A training process that stands still at a boundary, when its agent asks for it.

In: the attention word (looked at in every collective on all workers), letters of topic "pause".
Out: a call that is made later, what the script returned, a record of kind PAUSE in the ring:

    agent                                            worker, about to make its 812th call
    {"do":"arm","id":81,"group":0,"at":812,…}   ->
                                                <-   {"id":81,"say":"ready","count":812}
    {"do":"commit","id":81,…}                   ->   … run_script(script) …
                                                <-   {"id":81,"say":"done","results":[…],…}

The decisions are `localize.pause_worker`'s; here are the clock, the mailbox and threads. A thread
that waits sleeps in short pieces without the interpreter's lock. The script runs in a thread of its
own: what the trainer's thread has set (grad mode, autocast, inference mode, a compiler's tracing)
does not reach it, its collectives are not recorded, and where its time-outs fail it is left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from failslow.config import LocalizeConfig, load_config
from failslow.errors import ConfigError
from failslow.localize.pause_worker import TOPIC, Letter, PauseWorker

if TYPE_CHECKING:
    from failslow.capture.recorder import Recorder

__all__ = ["Pauser"]

_LOOK_S = 0.001
_SPARE_S = 0.4
"""The script is asked to end so long before it would be left behind."""
Runner = Callable[[list[Any], int], list[Any]]
"""(script, id of the pause) -> results."""


class Pauser:
    """The worker's side; made when the agent first asks for something.

    runner: instead of the benchmarks, in tests.
    """

    runner: Runner | None = None

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._worker = PauseWorker(silence_s=_silence_s())
        self._lock = threading.Lock()
        self._stray: threading.Thread | None = None

    def meet(self, group: int, count: int) -> None:
        """This thread is about to make its process's `count`-th call on `group`, spanning all.

        Raises only what signals raise; the pause is off for this worker then.
        """
        with self._lock:
            now_s = time.monotonic()
            self._read(now_s)
            worker = self._worker
            behind = worker.is_behind(group, count)
            unfit = self._unfit() if worker.is_boundary(group, count) else ""
            if unfit:
                self._send(worker.refuse(unfit))
            held_before = worker.state == "holding"
            self._send(worker.arrive(group, count, now_s, self._sign_s()))
            holds = worker.state == "holding" and not held_before
            self._settle()
        if holds:
            self._hold(group)
        while behind:  # another thread stands before an earlier call
            time.sleep(_LOOK_S)
            with self._lock:
                behind = self._worker.is_behind(group, count)

    def _hold(self, group: int) -> None:
        begun, worker = time.monotonic_ns(), self._worker
        number = worker.id
        try:
            while True:
                with self._lock:
                    now_s = time.monotonic()
                    self._read(now_s)
                    step, letters = worker.look(now_s, self._sign_s())
                    self._send(letters)
                if step != "hold":
                    break
                time.sleep(_LOOK_S)
            if step == "run":
                self._run(number)
        finally:
            with self._lock:
                if worker.id == number:  # not yet armed for the next one
                    self._send(worker.abandon("interrupted", time.monotonic()))
                self._settle()
            self._recorder.paused(begun, time.monotonic_ns(), number, group)

    def _run(self, number: int) -> None:
        """Run the script and report, whatever becomes of it."""
        worker, began_s = self._worker, time.monotonic()
        results: list[Any] = []
        failed: list[str] = []
        run = self.runner or _benchmarks(worker.limit_s, self._recorder.environ)

        def body() -> None:
            self._recorder.set_busy(True)
            try:
                results.extend(run(worker.script, number))
            except BaseException as error:
                failed.append(repr(error)[:500])

        thread = threading.Thread(target=body, name="failslow pause", daemon=True)
        thread.start()
        thread.join(worker.limit_s)
        if thread.is_alive():
            self._stray = thread
            failed.append(f"the script did not end within {worker.limit_s:.1f} s")
        with self._lock:
            now_s, error = time.monotonic(), "; ".join(failed)
            letter = worker.finish(list(results), error, began_s, now_s)
            if not self._post(letter):  # too long, or no plain values
                error = "the results have no room in the mailbox"
                self._post({**letter, "results": [], "error": error})

    def _unfit(self) -> str:
        """Why this worker cannot stand still before this call; "" when it can."""
        if self._stray is not None and self._stray.is_alive():
            return "the script of an earlier pause has not ended yet"
        import torch
        from torch.distributed import distributed_c10d as c10d

        if _cuda_is_used() and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        if getattr(c10d._world, "pg_coalesce_state", None):
            return "the call is one of several that are issued together"
        return ""

    def _read(self, now_s: float) -> None:
        mailbox = self._recorder.mailbox
        for letter in mailbox.receive(TOPIC) if mailbox is not None else ():
            self._send(self._worker.letter(letter, now_s))

    def _sign_s(self) -> float:
        """When the agent last gave a sign of life: it writes the time into the word."""
        return float(self._recorder.attention[0]) / 1e3

    def _settle(self) -> None:
        """Nothing is wanted any more. (An agent that just wanted something says it again.)"""
        mailbox = self._recorder.mailbox
        if self._worker.state == "idle" and mailbox is not None:
            mailbox.attention = 0

    def _send(self, letters: list[Letter]) -> None:
        for letter in letters:
            self._post(letter)

    def _post(self, letter: Letter) -> bool:
        mailbox = self._recorder.mailbox
        return mailbox is not None and mailbox.send(letter)


def _benchmarks(limit_s: float, environ: Mapping[str, str]) -> Runner:
    """What the script is run by, on the device of this thread."""
    import torch

    used = _cuda_is_used()
    device = torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")

    def run(script: list[Any], number: int) -> list[Any]:
        from failslow.localize.benchmarks import run_script

        if device.type == "cuda":
            torch.cuda.set_device(device)
        return run_script(
            script,
            rank=int(environ.get("RANK", "0")),
            world_size=int(environ.get("WORLD_SIZE", "1")),
            device=device,
            name=str(number),
            within_s=limit_s - _SPARE_S,
        )

    return run


def _cuda_is_used() -> bool:
    """By the trainer: even asking what there is could set CUDA up in a process that does not."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's


def _silence_s() -> float:
    try:
        return load_config("localize", LocalizeConfig).silence_s
    except ConfigError:  # the agent says so
        return LocalizeConfig().silence_s
