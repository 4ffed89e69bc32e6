"""The gateway's shell: the core on the bus, and the REST API in front of it."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from starlette.responses import Response

from services.gateway.api import create_app
from services.gateway.auth import ApiKeys, read_keys
from services.gateway.core import Deliver, Fail, GatewayCore
from services.gateway.service import Gateway
from services.gateway.settings import GatewaySettings
from shared.config import Common, load
from shared.errors import Unavailable
from shared.runtime import Shell, run_service, wait_for_stop
from shared.subjects import API_KEYS, GATEWAY

KEYS_PERIOD_S = 2.0

log = logging.getLogger("festina.gateway")


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the shell says when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


async def serve(common: Common, settings: GatewaySettings, stop: asyncio.Event) -> bool:
    """Run until told to stop, then end what runs, within `drain_s`; returns whether all went well."""
    shell = Shell(GATEWAY, common.id, common)
    keys = ApiKeys(read_keys(settings.api_keys_file) if settings.api_keys_file else None)
    core = GatewayCore(shell.ident, settings)
    gateway = Gateway(core, shell.feed, shell.tracing.tracer, keys, shell.store.answers)
    await shell.open()
    background: list[asyncio.Task[None]] = []
    try:
        keys.set_stored(await shell.store.read_texts(API_KEYS))
        await shell.start(core, {Deliver: gateway.route, Fail: gateway.route})
        await shell.restore()
        server = _Server(_http_config(create_app(gateway), shell, settings))
        background = [asyncio.create_task(_refresh_keys(shell, keys)), asyncio.create_task(server.serve())]
        well = await wait_for_stop(shell, stop)
        gateway.draining = True
        await _drain(gateway, common.drain_s)
        server.should_exit = True
        await background[1]
        return well
    finally:
        for task in background:
            task.cancel()
        await shell.close()


def _http_config(app: FastAPI, shell: Shell, settings: GatewaySettings) -> uvicorn.Config:
    @app.get("/metrics", tags=["health"])
    async def metrics() -> Response:
        """Show this gateway's Prometheus metrics."""
        return Response(shell.metrics.page(), media_type="text/plain; version=0.0.4")

    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        lifespan="off",
    )


async def _refresh_keys(shell: Shell, keys: ApiKeys) -> None:
    """Follow the store's keys; while it is away the last known ones hold."""
    while True:
        await asyncio.sleep(KEYS_PERIOD_S)
        with contextlib.suppress(Unavailable):
            keys.set_stored(await shell.store.read_texts(API_KEYS))


async def _drain(gateway: Gateway, within_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while gateway.inflight and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)
    if gateway.inflight:
        log.warning("stopped with requests still running", extra={"inflight": gateway.inflight})


def main() -> None:
    """Entry point."""
    common, settings = load(Common), load(GatewaySettings, GATEWAY)
    run_service(common, lambda stop: serve(common, settings, stop))


if __name__ == "__main__":
    main()
