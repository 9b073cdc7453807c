"""A worker that computes two thirds of the time; with RANK > 0 or peers, it also exchanges data.

RANK 0 listens, RANK 1 sends it 1 MB and waits for the answer of a byte, again and again.
"""

from __future__ import annotations

import os
import socket
import sys
import time

_SIZE_BYTES = 1 << 20


def _compute(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def _alone() -> None:
    print("up", flush=True)
    while True:
        _compute(0.04)
        time.sleep(0.02)


def _sink(address: tuple[str, int]) -> None:
    with socket.create_server(address) as server:
        stream, _ = server.accept()
    print("up", flush=True)
    left = _SIZE_BYTES
    while data := stream.recv(1 << 16):
        left -= len(data)
        if not left:
            left = _SIZE_BYTES
            stream.sendall(b"x")


def _source(address: tuple[str, int]) -> None:
    until_s = time.monotonic() + 30
    while True:
        try:
            stream = socket.create_connection(address)
            break
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)
    print("up", flush=True)
    while True:
        stream.sendall(bytes(_SIZE_BYTES))
        if not stream.recv(1):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        _alone()
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    (_sink if os.environ["RANK"] == "0" else _source)(place)
