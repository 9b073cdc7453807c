"""Real servers the contract runs against: each can be killed, restarted, stopped and resumed."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from failslow.runtime.transport import Endpoint
from failslow.runtime.transport.memory import memory_hub

TOKEN = "0123456789abcdef0123456789abcdef"
Connect = Callable[..., Endpoint]
REDIS_SERVER = shutil.which("redis-server")
CAPACITY = 2048
_SERVE = """
import sys, signal
from failslow.runtime.transport.tcpstore import serve
server = serve(sys.argv[1], capacity=int(sys.argv[2]))
print(server.url, flush=True)
signal.pause()
"""


class Server(Protocol):
    url: str
    needs_threads: bool

    def kill(self) -> None: ...
    def restart(self) -> None: ...
    def stop(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...
    def listening(self) -> set[str]: ...


class MemoryServer:
    needs_threads = False

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        self._hub = memory_hub(name)
        self.kill, self.restart = self._hub.kill, self._hub.restart
        self.stop, self.resume = self._hub.stall, self._hub.resume

    def close(self) -> None:
        self._hub.kill()

    def listening(self) -> set[str]:
        return set()


class ProcessServer:
    """A server process on a loopback port that stays the same over restarts."""

    needs_threads = True

    def __init__(self, scheme: str, command: Callable[[int], list[str]], folder: Path) -> None:
        self.port = free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._command, self._folder = command, folder
        self.start()

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command(self.port),
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        until(lambda: accepts(self.port) or self.process.poll() is not None, 60)
        assert self.process.poll() is None, (self._folder / "log").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.start()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        # a thread stops when it next gets a core, and would answer until then
        tasks = list(Path(f"/proc/{self.process.pid}/task").glob("*/stat"))
        until(lambda: all(t.read_text().rpartition(")")[2].split()[0] == "T" for t in tasks))

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()

    def listening(self) -> set[str]:
        return listening_addresses(self.process.pid)


def tcpstore_server(folder: Path, capacity: int = CAPACITY) -> ProcessServer:
    def command(port: int) -> list[str]:
        return [sys.executable, "-c", _SERVE, f"tcpstore://127.0.0.1:{port}", str(capacity)]

    return ProcessServer("tcpstore", command, folder)


def redis_server(folder: Path, *options: str) -> ProcessServer:
    def command(port: int) -> list[str]:
        assert REDIS_SERVER
        where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        return [REDIS_SERVER, *where, *(options or ("--save", "", "--appendonly", "no"))]

    return ProcessServer("redis", command, folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def listening_addresses(pid: int) -> set[str]:
    """The addresses process `pid` listens on, from the system's socket table."""
    sockets = psutil.Process(pid).net_connections(kind="tcp")
    return {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}


def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Wait for `condition`; fails the test after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s} s"
        time.sleep(0.01)


def skip_without_redis() -> None:
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    if importlib.util.find_spec("redis") is None:
        pytest.skip("the redis package is not installed: pip install 'failslow[redis]'")
