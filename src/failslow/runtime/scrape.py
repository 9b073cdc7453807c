"""The HTTP server Prometheus scrapes.

In: an address and a registry. Out: every GET is answered with the registry as text:

    with MetricsServer("127.0.0.1", 0, registry) as server: print(server.url)
"""

from __future__ import annotations

import socket
import socketserver
import threading
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any

from prometheus_client import MetricsHandler
from prometheus_client.registry import Collector

__all__ = ["MetricsServer"]

_CLIENT_TIMEOUT_S = 10.0


class MetricsServer:
    """A running server of one registry, in a daemon thread; `close` ends it.

    Raises OSError when `address`:`port` cannot be had.
    """

    def __init__(self, address: str, port: int, registry: Collector) -> None:
        handler = type("_RegistryHandler", (_Handler,), {"registry": registry})
        self._server = server = _HttpServer((address, port), handler)
        self.address, self.port = str(server.server_address[0]), int(server.server_address[1])
        self._thread = threading.Thread(
            target=server.serve_forever, name="failslow-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where to scrape."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening; again: no effect."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Handler(MetricsHandler):
    timeout = _CLIENT_TIMEOUT_S  # a client that says nothing holds a thread


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[MetricsHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks its address up in DNS, which may take seconds
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing to print."""
