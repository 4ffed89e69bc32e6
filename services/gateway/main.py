"""The gateway's shell: the core on the bus, and the REST API in front of it."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from starlette.responses import Response

from services.gateway.api import create_app
from services.gateway.auth import ApiKeys, read_keys, read_tenants
from services.gateway.core import Deliver, Fail, GatewayCore
from services.gateway.limits import Tenants
from services.gateway.quota import Quota
from services.gateway.service import Gateway
from services.gateway.settings import GatewaySettings
from shared.config import Common, load
from shared.errors import Unavailable
from shared.metrics import Metrics
from shared.model import Tenant
from shared.process import run_service
from shared.runtime import Shell, wait_for_stop
from shared.subjects import API_KEYS, GATEWAY, TENANT_KEYS

KEYS_PERIOD_S = 2.0
# Longer than clients keep an idle connection (httpx: 5 s): a call sent on one just being closed would fail.
KEEP_ALIVE_S = 75

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
    path = settings.api_keys_file
    keys = ApiKeys(read_keys(path) if path else None)
    tenants = Tenants(read_tenants(path) if path else None)
    core = GatewayCore(shell.ident, settings)
    quota = Quota(shell.ident, shell.store.run, shell.metrics.count)
    gateway = Gateway(
        core, shell.feed, shell.tracing.tracer, keys, shell.store.answers, tenants=tenants, quota=quota
    )
    await shell.open()
    background: list[asyncio.Task[None]] = []
    try:
        await _refresh(shell, gateway)
        await shell.start(core, {Deliver: gateway.route, Fail: gateway.route})
        server = _Server(_http_config(create_app(gateway), shell, gateway, settings))
        background = [asyncio.create_task(_keep_fresh(shell, gateway)), asyncio.create_task(server.serve())]
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


def _http_config(app: FastAPI, shell: Shell, gateway: Gateway, settings: GatewaySettings) -> uvicorn.Config:
    @app.get("/metrics", tags=["health"])
    async def metrics() -> Response:
        """Show this gateway's Prometheus metrics."""
        _show_load(shell.metrics, gateway)
        return Response(shell.metrics.page(), media_type="text/plain; version=0.0.4")

    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="off",
    )


async def _keep_fresh(shell: Shell, gateway: Gateway) -> None:
    """Follow the store's keys and limits; while it is away the last known ones hold."""
    while True:
        await asyncio.sleep(KEYS_PERIOD_S)
        with contextlib.suppress(Unavailable):
            await _refresh(shell, gateway)


async def _refresh(shell: Shell, gateway: Gateway) -> None:
    gateway.keys.set_stored(await shell.store.read_texts(API_KEYS))
    gateway.tenants.set_stored(await shell.store.read_all(TENANT_KEYS, Tenant))
    await gateway.quota.renew()
    _show_load(shell.metrics, gateway)


def _show_load(metrics: Metrics, gateway: Gateway) -> None:
    """Show what is in progress: all of it is 0 when no client waits for anything."""
    metrics.show("gateway_inflight_requests", {}, gateway.inflight)
    metrics.show("gateway_open_inboxes", {}, gateway.listening)
    metrics.show("gateway_limit_places", {}, gateway.quota.places)
    metrics.show("gateway_limit_corrections", {}, gateway.quota.corrections)
    metrics.show("gateway_limits_shared", {}, 0.0 if gateway.quota.alone else 1.0)


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
