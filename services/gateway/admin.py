"""The admin API: models, GPUs and tenants. Where API keys are used it needs one of the tenant ``admin``."""

from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from services.gateway.core import AddModel, DrainGpu, RemoveModel, SetTenant
from services.gateway.limits import fault
from services.gateway.openai_schema import invalid
from services.gateway.service import Gateway
from services.gateway.web import json_response, read_body
from shared.errors import InvalidRequest
from shared.model import GpuSummary, ModelSpec, Tenant, slug

T = TypeVar("T", bound=msgspec.Struct)

ENGINES = ("emulated", "vllm")
POSITIVE = (
    "params",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "weight_bytes",
    "kv_bytes_per_token",
    "context_tokens",
)
SHOWN = frozenset({"state", "gpus"})  # what a listing adds to a model; taken back without complaint
MAX_NAME_CHARS = 200


def add_admin(app: FastAPI, gateway: Gateway) -> None:
    """Add the admin routes to the application."""
    _add_models(app, gateway)
    _add_gpus(app, gateway)
    _add_tenants(app, gateway)


def _add_models(app: FastAPI, gateway: Gateway) -> None:
    registry = gateway.registry

    @app.get("/admin/models", tags=["admin"])
    async def models(request: Request) -> Response:
        """List the models: shape, objectives, whether they are loaded and where."""
        _require_admin(gateway, request)
        return json_response({"models": [_shown(gateway, model) for model in registry.models.values()]})

    @app.post("/admin/models", tags=["admin"])
    async def add_model(request: Request) -> Response:
        """Register a model; an identical one is no error."""
        _require_admin(gateway, request)
        model = parse_model(await read_body(request, gateway.settings.max_body_bytes))
        conflict = registry.conflict(model)
        if conflict:
            raise InvalidRequest(409, "model_exists", conflict, "name")
        await gateway.tokenizer(model)  # better refused now than at its first request
        gateway.feed(AddModel(model))
        return json_response(_shown(gateway, model), 201)

    @app.delete("/admin/models/{name:path}", tags=["admin"])
    async def remove_model(name: str, request: Request) -> Response:
        """Remove a model: it takes no new requests, and is unloaded when its last one has ended."""
        _require_admin(gateway, request)
        if name not in registry.models:
            raise InvalidRequest(404, "model_not_found", f"there is no model {name!r} here", "name")
        gateway.feed(RemoveModel(name))
        return json_response({"name": name, "removed": True})


def _add_gpus(app: FastAPI, gateway: Gateway) -> None:
    registry = gateway.registry

    @app.get("/admin/gpus", tags=["admin"])
    async def gpus(request: Request) -> Response:
        """List the GPUs: state, clock, watts, memory, resident models and their queues."""
        _require_admin(gateway, request)
        found = sorted(registry.gpus.values(), key=lambda summary: summary.gpu)
        return json_response({"gpus": [_gpu(summary, summary.gpu in registry.silent) for summary in found]})

    def drain_gpu(request: Request, gpu: str, on: bool) -> Response:
        _require_admin(gateway, request)
        if gpu not in registry.gpus:
            raise InvalidRequest(404, "gpu_not_found", f"there is no GPU {gpu!r}; GET /admin/gpus lists them")
        gateway.feed(DrainGpu(gpu, on))
        return json_response({"gpu": gpu, "draining": on}, 202)

    @app.post("/admin/gpus/{gpu}/drain", tags=["admin"])
    async def drain(gpu: str, request: Request) -> Response:
        """Let a GPU take no new work; what waits there moves away, and what runs moves or ends."""
        return drain_gpu(request, gpu, True)

    @app.post("/admin/gpus/{gpu}/undrain", tags=["admin"])
    async def undrain(gpu: str, request: Request) -> Response:
        """Let a drained GPU take work again."""
        return drain_gpu(request, gpu, False)


def _add_tenants(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/admin/tenants", tags=["admin"])
    async def tenants(request: Request) -> Response:
        """List the tenants that have limits or a weight; any other has no limit, and weight 1."""
        _require_admin(gateway, request)
        return json_response({"tenants": [_all_fields(tenant) for tenant in gateway.tenants.all()]})

    @app.put("/admin/tenants/{name}", tags=["admin"])
    async def set_tenant(name: str, request: Request) -> Response:
        """Set a tenant's limits, all of them: one that is left out or null is no limit."""
        _require_admin(gateway, request)
        fields = _fields(await read_body(request, gateway.settings.max_body_bytes))
        tenant = _convert({**fields, "name": name}, Tenant, "a tenant")
        if wrong := fault(tenant):
            raise invalid(*wrong)
        if conflict := gateway.tenants.conflict(tenant):
            raise InvalidRequest(409, "tenant_conflict", conflict, "name")
        gateway.tenants.put(tenant)
        gateway.feed(SetTenant(tenant))
        return json_response(_all_fields(tenant))


def parse_model(data: bytes) -> ModelSpec:
    """Return the model that a JSON body describes. Raises InvalidRequest (400) naming the field at fault."""
    fields = {name: value for name, value in _fields(data).items() if name not in SHOWN}
    model = _convert(fields, ModelSpec, "a model")
    _check_model(model)
    return model


def _fields(data: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(400, "invalid_json", "the body must be a JSON object")
    return fields


def _convert(fields: dict[str, Any], kind: type[T], what: str) -> T:
    unknown = sorted(fields.keys() - {field.name for field in msgspec.structs.fields(kind)})
    if unknown:
        raise invalid(unknown[0], f"{what} has no field {unknown[0]!r}", "unknown_parameter")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise invalid(None, str(error)) from None


def _check_model(model: ModelSpec) -> None:
    if not slug(model.name) or model.name != model.name.strip() or len(model.name) > MAX_NAME_CHARS:
        message = (
            f"a name has 1 to {MAX_NAME_CHARS} characters, letters or digits among them, no space around"
        )
        raise invalid("name", message)
    if model.engine not in ENGINES:
        raise invalid("engine", f"engine must be one of {', '.join(ENGINES)}, not {model.engine!r}")
    for name in POSITIVE:
        if getattr(model, name) <= 0:
            raise invalid(name, f"{name} must be positive, not {getattr(model, name)}")
    if model.engine == "vllm" and not model.weights:
        raise invalid("weights", "a model of the vllm engine needs weights: the folder to load")
    if model.keep_alive_ms is not None and model.keep_alive_ms < 0:
        raise invalid("keep_alive_ms", "keep_alive_ms must not be negative; null keeps the model loaded")
    objectives = model.objectives
    if objectives is not None and not (objectives.ttft_ms > 0 and objectives.tbt_ms > 0):
        raise invalid("objectives", "objectives must be positive numbers of milliseconds")


def _require_admin(gateway: Gateway, request: Request) -> None:
    gateway.keys.require_admin(request.headers.get("authorization"))


def _shown(gateway: Gateway, model: ModelSpec) -> dict[str, Any]:
    holders = [
        summary.gpu
        for summary in gateway.registry.live_gpus()
        if any(engine.model == model.name for engine in summary.engines)
    ]
    fields: dict[str, Any] = _all_fields(model)
    return {**fields, "state": gateway.registry.state_of(model.name), "gpus": holders}


def _gpu(summary: GpuSummary, silent: bool) -> dict[str, Any]:
    shown: dict[str, Any] = _all_fields(summary)
    if silent:
        shown["state"] = "silent"
    return shown


def _all_fields(value: Any) -> Any:
    """Return a struct as plain values, the fields at their defaults included."""
    if isinstance(value, msgspec.Struct):
        return {field: _all_fields(getattr(value, field)) for field in value.__struct_fields__}
    return [_all_fields(each) for each in value] if isinstance(value, tuple) else value
