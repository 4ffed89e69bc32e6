"""`festina up`: start a whole pool on this machine, show how it comes up, and take it down on Ctrl-C."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from services.cli import tables
from services.cli.pool import GPU_TYPE, Pool, PoolSettings
from services.cli.supervise import port_is_free
from services.local_sched.vllm_env import prepare_model, prepare_vllm_env
from shared.catalog import emulated_models
from shared.config import Common, load
from shared.devices import device_for
from shared.errors import FestinaError
from shared.model import ModelSpec
from shared.systems import system_for

READY_WITHIN_S = 60.0
MODELS_WITHIN_S = 60.0


class Up:
    """One run of `festina up`."""

    def __init__(self, settings: PoolSettings, console: Console) -> None:
        self.settings = settings
        self.console = console
        self.url = f"http://127.0.0.1:{settings.port}"
        self.pool = Pool(settings, os.environ)
        key = os.environ.get("FESTINA_ADMIN_KEY", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=5.0, trust_env=False)

    async def run(self) -> None:
        """Start, serve until told to stop, and take everything down again.

        Raises:
            FestinaError: something did not start; what had started is taken down first.
        """
        system_for(self.settings.system)
        if self.settings.default_clock_mhz:
            device_for(GPU_TYPE).at_default_clock(self.settings.default_clock_mhz)
        for port in self.settings.ports:
            if not port_is_free("127.0.0.1", port):
                raise FestinaError(f"port {port} is taken (another Festina?); set FESTINA_PORT to a free one")
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        work = asyncio.create_task(self._serve())
        told = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({work, told}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self.console.print("[dim]draining; what runs may end first[/dim]")
            for task in (work, told):
                task.cancel()
                with suppress(asyncio.CancelledError, FestinaError):
                    await task
            await self.http.aclose()
            await self.pool.stop(load(Common).drain_s + 5.0)
            self.console.print("[dim]stopped[/dim]")

    async def _serve(self) -> None:
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        ) as progress:
            await self._start_processes(progress)
            await self._load_emulated_models(progress)
        self._announce()
        if not self.settings.emulated:
            await self._add_cpu_host()
        while True:
            await asyncio.sleep(3600)

    async def _start_processes(self, progress: Progress) -> None:
        self.pool.prepare()
        services = self.pool.core_services()
        bar = progress.add_task("starting processes", total=len(self.pool.servers) + len(services))
        for server in self.pool.servers:
            await server.start(restart=False)
            progress.advance(bar)
        # profiled while no pool ran: the services find them when they start
        common, profiled = tables.servers_of(self.pool.state_dir), tables.tables_dir(self.pool.state_dir)
        for why in await tables.offer_files(common, profiled):
            self.console.print(f"[yellow]look-up table left out: {why}[/yellow]")
        for service in services:
            await service.start()
            progress.advance(bar)
        deadline = asyncio.get_running_loop().time() + READY_WITHIN_S
        path = "/ready" if self.settings.gpus else "/health"
        while not all([await self._answers(port, path) for port in self.settings.ports]):
            for child in self.pool.servers + services:
                child.expect_alive()
            if asyncio.get_running_loop().time() > deadline:
                raise FestinaError(f"not ready after {READY_WITHIN_S:.0f} s; logs are in {self.pool.log_dir}")
            await asyncio.sleep(0.1)

    async def _load_emulated_models(self, progress: Progress) -> None:
        models = emulated_models(self.settings.models) if self.settings.gpus else ()
        bar = progress.add_task("loading models", total=len(models))
        for model in models:
            await self._register(model)
        deadline = asyncio.get_running_loop().time() + MODELS_WITHIN_S
        wanted = {model.name for model in models}
        while asyncio.get_running_loop().time() < deadline:
            listed = (await self.http.get("/v1/models")).json()["data"]
            loaded = [m for m in listed if m["id"] in wanted and m["state"] == "ready"]
            progress.update(bar, completed=len(loaded))
            if len(loaded) == len(wanted):
                return
            await asyncio.sleep(0.1)
        self.console.print(
            "[yellow]not every model is loaded; the others load when they are asked for[/yellow]"
        )

    async def _add_cpu_host(self) -> None:
        """Add the host with the real engine; a platform that cannot have it costs one line, nothing more."""

        def say(message: str) -> None:
            self.console.print(f"[dim]cpu host: {message}[/dim]")

        try:
            await asyncio.to_thread(prepare_vllm_env, Path(self.settings.vllm_env), progress=say)
            model = await asyncio.to_thread(
                prepare_model,
                Path(self.settings.vllm_env),
                self.pool.state_dir / "models",
                progress=say,
            )
        except FestinaError as error:
            self.console.print(f"[yellow]going on without the CPU host: {error}[/yellow]")
            return
        for service in self.pool.cpu_services():
            await service.start()
        await self._register(model)
        say(f"{model.name} is loading")
        while not await self._ready(model.name):
            await asyncio.sleep(0.5)
        say(f"{model.name} is ready")

    async def _register(self, model: ModelSpec) -> None:
        answer = await self.http.post("/admin/models", content=msgspec.json.encode(model))
        if answer.status_code >= 400:
            raise FestinaError(f"model {model.name} was not accepted: {answer.text}")

    async def _ready(self, name: str) -> bool:
        answer = await self.http.get(f"/v1/models/{name}")
        return answer.status_code == 200 and answer.json()["state"] == "ready"

    async def _answers(self, port: int, path: str) -> bool:
        try:
            return (await self.http.get(f"http://127.0.0.1:{port}{path}")).status_code == 200
        except httpx.HTTPError:
            return False

    def _announce(self) -> None:
        body = '{"model": "Qwen2.5-7B-Instruct", "messages": [{"role": "user", "content": "Hello"}]}'
        text = f"""
Festina serves on {self.url}/v1   (API: {self.url}/docs, logs: {self.pool.log_dir}; Ctrl-C drains and stops)

  curl {self.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{self.url}/v1", api_key="none")
  answer = client.chat.completions.create(**{body})
  print(answer.choices[0].message.content, answer.festina)
"""
        # no wrapping, no markup: the lines are there to be copied
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)
