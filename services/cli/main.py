"""`festina`: the command line."""

import asyncio
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.cli import explain, profile
from services.cli.doctor import doctor
from services.cli.lut import lut_app
from shared.errors import FestinaError
from sim import cli as sim_cli
from sim import compare_cli, paper_cli

app = typer.Typer(
    name="festina",
    help="Serve many LLMs on few shared GPUs for the least energy that still meets latency objectives.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
models_app = typer.Typer(help="The models that the pool serves.", no_args_is_help=True)
gpus_app = typer.Typer(help="The GPUs of the pool.", no_args_is_help=True)
keys_app = typer.Typer(
    help="API keys, each naming a tenant; without any the API is open.", no_args_is_help=True
)
app.add_typer(models_app, name="models")
app.add_typer(lut_app, name="lut")
app.add_typer(gpus_app, name="gpus")
tenants_app = typer.Typer(help="What each tenant may use.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(tenants_app, name="tenants")
app.command()(profile.profile)
app.command()(sim_cli.sim)
app.command()(sim_cli.plan)
app.command()(compare_cli.compare)
app.command()(compare_cli.bound)
app.command()(paper_cli.paper)
app.command()(explain.explain)
app.command()(doctor)

Url = Annotated[str, typer.Option(envvar="FESTINA_URL", help="Address of a gateway.")]
AdminKey = Annotated[
    str, typer.Option(envvar="FESTINA_ADMIN_KEY", help="Key of the tenant `admin`, if keys are used.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
DEFAULT_URL = f"http://127.0.0.1:{os.environ.get('FESTINA_PORT', '8000')}"

console = Console()
errors = Console(stderr=True)


@app.command()
def up(
    port: Annotated[
        int, typer.Option(envvar="FESTINA_PORT", help="Port of the REST API on 127.0.0.1.")
    ] = 8000,
    emulated: Annotated[bool, typer.Option(help="Leave out the CPU host with its real vLLM engine.")] = False,
    gpus: Annotated[int, typer.Option(min=0, max=64, help="Emulated H100 GPUs.")] = 4,
    hosts: Annotated[int, typer.Option(min=1, max=64, help="Emulated hosts that the GPUs are on.")] = 1,
    gateways: Annotated[
        int, typer.Option(min=1, max=16, help="Gateways; the second listens on the next port, and so on.")
    ] = 1,
    schedulers: Annotated[int, typer.Option(min=1, max=16, help="Global schedulers.")] = 1,
    consolidators: Annotated[
        int, typer.Option(min=1, max=16, help="Consolidators; one leads, the others take over.")
    ] = 1,
    models: Annotated[int, typer.Option(min=0, max=43, help="Models of the catalog to serve on them.")] = 16,
    state_dir: Annotated[
        str, typer.Option(envvar="FESTINA_STATE_DIR", help="Where logs, store and models are kept.")
    ] = ".festina",
    vllm_env: Annotated[
        str, typer.Option(envvar="FESTINA_VLLM_ENV", help="Virtual environment of the vLLM engine.")
    ] = ".venv-vllm",
    system: Annotated[
        str, typer.Option(envvar="FESTINA_SYSTEM", help="The serving system: see `festina systems`.")
    ] = "festina",
    default_clock: Annotated[
        int,
        typer.Option(
            envvar="FESTINA_DEVICE_DEFAULT_CLOCK_MHZ",
            help="MHz of emulated GPUs that nobody governs; 0: as the H100 has it.",
        ),
    ] = 0,
) -> None:
    """Start a whole pool on this machine, and stop it on Ctrl-C.

    The emulated GPUs make up tokens; their times, watts and memory follow a calibrated model of the H100. The
    CPU host answers with a real vLLM engine and SmolLM2-135M-Instruct.
    """
    from services.cli.pool import PoolSettings
    from services.cli.up import Up

    settings = PoolSettings(
        port=port,
        emulated=emulated,
        gpus=gpus,
        hosts=hosts,
        gateways=gateways,
        schedulers=schedulers,
        consolidators=consolidators,
        models=models,
        state_dir=state_dir,
        vllm_env=vllm_env,
        system=system,
        default_clock_mhz=default_clock,
    )
    asyncio.run(Up(settings, Console()).run())


@app.command()
def systems(as_json: Json = False) -> None:
    """List the serving systems that `up` and `sim` know, with what each can do (Table 1 of the paper)."""
    from shared.systems import SYSTEMS

    if as_json:
        _print_json({name: msgspec.to_builtins(system) for name, system in SYSTEMS.items()})
        return
    table = Table("system", "shares", "adapts", "energy", "phases", "what it is", box=None)
    table.columns[0].no_wrap = True
    for name, s in SYSTEMS.items():
        table.add_row(name, s.spatial_sharing, s.reconfigures, s.energy_aware, s.phase_aware, s.about)
    console.print(table)
    console.print("shares GPUs between models; adapts their parts; weighs energy; tells phases apart")


@models_app.command("list")
def models_list(url: Url = DEFAULT_URL, key: AdminKey = "", as_json: Json = False) -> None:
    """List the models: engine, size, objectives, and whether they are loaded."""
    found = _call("GET", url, "/admin/models", key)["models"]
    if as_json:
        _print_json(found)
        return
    table = Table("model", "engine", "weights GB", "context", "keep-alive s", "state", "GPUs")
    for m in found:
        keep_alive = m.get("keep_alive_ms", 60_000.0)
        table.add_row(
            m["name"],
            m["engine"],
            f"{m['weight_bytes'] / 1e9:.1f}",
            str(m.get("context_tokens", 8192)),
            "always" if keep_alive is None else f"{keep_alive / 1000:.0f}",
            m["state"],
            ", ".join(m["gpus"]),
        )
    console.print(table)


@models_app.command("add")
def models_add(file: Path, url: Url = DEFAULT_URL, key: AdminKey = "") -> None:
    """Register the model that a JSON FILE describes (fields as `festina models list --json` shows them)."""
    try:
        body = file.read_bytes()
    except OSError as error:
        raise FestinaError(f"{file} cannot be read: {error.strerror}") from None
    _call("POST", url, "/admin/models", key, body)
    console.print(f"registered {msgspec.json.decode(body).get('name')}")


@models_app.command("add-catalog")
def models_add_catalog(
    count: Annotated[int, typer.Option(min=0, max=43, help="How many models of the catalog, by rank.")] = 16,
    url: Url = DEFAULT_URL,
    key: AdminKey = "",
) -> None:
    """Register the first models of the catalog, for emulated GPUs; one that is there already is no error."""
    from shared.catalog import emulated_models

    for model in emulated_models(count):
        _call("POST", url, "/admin/models", key, msgspec.json.encode(model))
    console.print(f"registered {count} models of the catalog")


@models_app.command("remove")
def models_remove(name: str, url: Url = DEFAULT_URL, key: AdminKey = "") -> None:
    """Remove a model: no new requests; it is unloaded when its last one has ended."""
    _call("DELETE", url, f"/admin/models/{name}", key)
    console.print(f"removed {name}")


@gpus_app.command("list")
def gpus_list(url: Url = DEFAULT_URL, key: AdminKey = "", as_json: Json = False) -> None:
    """List the GPUs: clock, watts, memory, resident models and their queues."""
    found = _call("GET", url, "/admin/gpus", key)["gpus"]
    if as_json:
        _print_json(found)
        return
    table = Table("GPU", "type", "state", "clock MHz", "watts", "free GB", "models (running/queued)")
    for gpu in found:
        engines = [f"{e['model']} ({e['running']}/{e['queued']}) {e['state']}" for e in gpu["engines"]]
        watts = "no meter" if gpu["power_w"] is None else f"{gpu['power_w']:.0f}"
        table.add_row(
            gpu["gpu"],
            gpu["gpu_type"],
            gpu["state"],
            str(gpu["sm_clock_mhz"] or "-"),
            watts,
            f"{gpu['free_bytes'] / 1e9:.1f}",
            "\n".join(engines) or "-",
        )
    console.print(table)


@gpus_app.command("drain")
def gpus_drain(gpu: str, url: Url = DEFAULT_URL, key: AdminKey = "") -> None:
    """Let a GPU take no new work; what waits there moves away, and what runs moves or ends."""
    _call("POST", url, f"/admin/gpus/{gpu}/drain", key)
    console.print(f"draining {gpu}")


@gpus_app.command("undrain")
def gpus_undrain(gpu: str, url: Url = DEFAULT_URL, key: AdminKey = "") -> None:
    """Let a drained GPU take work again."""
    _call("POST", url, f"/admin/gpus/{gpu}/undrain", key)
    console.print(f"{gpu} takes work again")


@keys_app.command("add")
def keys_add(tenant: str) -> None:
    """Make an API key for TENANT in the store (FESTINA_REDIS_URL) and print it, this once."""
    from shared.config import Common, load
    from shared.store import Store
    from shared.subjects import API_KEYS

    key = "fst-" + secrets.token_urlsafe(32)

    async def write() -> None:
        store = Store(load(Common))
        await store.connect()
        await store.write_text(API_KEYS + hashlib.sha256(key.encode()).hexdigest(), tenant)
        await store.close()

    asyncio.run(write())
    console.print(key)


@tenants_app.command("list")
def tenants_list(url: Url = DEFAULT_URL, key: AdminKey = "", as_json: Json = False) -> None:
    """List the tenants that have limits or a weight; any other has no limit, and weight 1."""
    found = _call("GET", url, "/admin/tenants", key)["tenants"]
    if as_json:
        _print_json(found)
        return
    limits = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
    table = Table("tenant", "requests/minute", "tokens/minute", "concurrent", "weight")
    for t in found:
        table.add_row(t["name"], *("-" if t[n] is None else f"{t[n]:,}" for n in limits), f"{t['weight']:g}")
    console.print(table)


@tenants_app.command("set")
def tenants_set(
    tenant: str,
    requests_per_minute: Annotated[int | None, typer.Option(help="Calls in any 60 s.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Tokens, in and out, in any 60 s.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Calls being served at one time.")] = None,
    weight: Annotated[float, typer.Option(help="Its part of what is short, beside the others'.")] = 1.0,
    url: Url = DEFAULT_URL,
    key: AdminKey = "",
) -> None:
    """Set what TENANT may use, all gateways together; a limit that is left out is no limit."""
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "weight": weight,
    }
    _call("PUT", url, f"/admin/tenants/{quote(tenant, safe='')}", key, json.dumps(limits).encode())
    console.print(f"set the limits of {tenant}; every gateway has them within 2 s")


def _call(method: str, url: str, path: str, key: str, body: bytes | None = None) -> Mapping[str, Any]:
    """Send one admin request; an error of the gateway or of the network becomes one line."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(
            method, url + path, headers=headers, content=body, timeout=10.0, trust_env=False
        )
    except httpx.HTTPError as error:
        raise FestinaError(f"no gateway answers at {url}: {error}; start one with `festina up`") from None
    try:
        content = answer.json()
    except json.JSONDecodeError:
        raise FestinaError(f"{url}{path} answered {answer.status_code} and no JSON") from None
    if answer.status_code >= 400:
        raise FestinaError(content.get("error", {}).get("message", answer.text))
    return dict(content)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Run the command line; an error made on purpose, or of a file, is one line on stderr and status 1."""
    try:
        app()
    except FestinaError as error:
        why = str(error)
    except OSError as error:
        if error.filename is None:
            raise  # no path that somebody gave
        why = f"{error.filename}: {error.strerror}"
    else:
        return
    errors.print(f"[red]error:[/red] {escape(why)}", highlight=False, soft_wrap=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
