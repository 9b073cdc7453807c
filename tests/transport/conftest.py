"""One server of each kind for the whole folder; a test that breaks it mends it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from tests.transport.servers import (
    TOKEN,
    Connect,
    MemoryServer,
    Server,
    redis_server,
    skip_without_redis,
    tcpstore_server,
)

from failslow.runtime.transport import Endpoint, Limits, from_url


@pytest.fixture(scope="session", autouse=True)
def _calm_torch() -> Iterator[None]:
    """What an agent's environment holds too: see `tcpstore`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        patch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session", params=["memory", "tcpstore", "redis"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    made: Server
    if request.param == "memory":
        made = MemoryServer("contract")
    elif request.param == "tcpstore":
        if importlib.util.find_spec("torch") is None:
            pytest.skip("torch is not installed: pip install 'failslow[torch]'")
        made = tcpstore_server(tmp_path_factory.mktemp("tcpstore"))
    else:
        skip_without_redis()
        made = redis_server(tmp_path_factory.mktemp("redis"))
    yield made
    made.close()


@pytest.fixture
def connect(server: Server, request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes endpoints on the server; the job is the test, so tests share nothing."""
    made: list[Endpoint] = []

    def connect(
        sender: str = "reader",
        *,
        token: str = TOKEN,
        limits: Limits | None = None,
        job: str = request.node.name,
    ) -> Endpoint:
        transport = from_url(server.url, limits or Limits(interval_s=0.02, stall_s=2.0))
        made.append(Endpoint(transport, job=job, sender=sender, token=token))
        return made[-1]

    yield connect
    for endpoint in made:
        endpoint.close(linger_s=0.0)
