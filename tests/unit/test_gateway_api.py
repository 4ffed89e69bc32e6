"""The REST API over the real core, with scripted GPUs in place of the bus."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gateway.api import create_app
from services.gateway.auth import ApiKeys, digest_of
from services.gateway.core import Deliver, Fail, GatewayCore
from services.gateway.service import Gateway
from services.gateway.settings import GatewaySettings
from services.gateway.text import TextStream
from services.gateway.tokenizers import ChatTokenizer
from shared import events as ev
from shared.model import EngineSummary, GpuSummary, ModelSpec, Request, RequestEnd

TOKENIZER = ChatTokenizer.load("standin")
ANSWER = tuple(TOKENIZER.encode("Water is wet. Fire is hot."))
END = RequestEnd(finish_reason="stop", energy_j=2.5, energy_source="meter", queue_ms=4.0)


class Pool:
    """One GPU that answers every request with `ANSWER`, a token a message, unless told otherwise."""

    def __init__(self, **settings: Any) -> None:
        self.core = GatewayCore("gw", GatewaySettings(**settings))
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.keys = ApiKeys()
        self.store_up = True
        self.now_ms = 0.0
        self.seen: list[Request] = []
        self.aborted: list[ev.Abort] = []
        self.sent: list[ev.Send] = []
        self.playing: set[asyncio.Task[None]] = set()
        self.on_dispatch: Callable[[Request], list[ev.Message]] = self.answer
        self.gateway = Gateway(self.core, self.feed, provider.get_tracer("t"), self.keys, self.store_answers)
        self.app: FastAPI = create_app(self.gateway)
        for spec in (model("m"), model("Org/Big.1"), model("secret", tenants=("team-a",))):
            self.feed(ev.ModelRegistered(model=spec))
        self.feed(ev.SummaryChanged(summary=SUMMARY))

    async def store_answers(self) -> bool:
        return self.store_up

    def feed(self, event: ev.Message | ev.Event) -> None:
        self.now_ms += 10.0
        for action in self.core.step(self.now_ms, event):
            if isinstance(action, Deliver | Fail):
                self.gateway.route(action)
            elif isinstance(action, ev.Send):
                self.sent.append(action)
                if isinstance(action.message, ev.Dispatch):
                    self.seen.append(action.message.request)
                    playing = asyncio.create_task(self.play(self.on_dispatch(action.message.request)))
                    self.playing.add(playing)
                    playing.add_done_callback(self.playing.discard)
                elif isinstance(action.message, ev.Abort):
                    self.aborted.append(action.message)

    async def play(self, messages: list[ev.Message]) -> None:
        for message in messages:
            await asyncio.sleep(0.001)
            self.feed(message)

    def answer(self, request: Request) -> list[ev.Message]:
        ids = ANSWER[: request.max_tokens]
        end = END if len(ids) == len(ANSWER) else RequestEnd(finish_reason="length")
        return [admitted(request)] + [
            delta(request, i, token_id, end=end if i == len(ids) - 1 else None)
            for i, token_id in enumerate(ids)
        ]

    def silent_after(self, count: int) -> None:
        """From now on give only so many tokens."""
        self.on_dispatch = lambda request: self.answer(request)[: 1 + count]


def admitted(request: Request) -> ev.Message:
    return ev.Admitted(request_id=request.request_id, attempt=request.attempt, gpu="g0")


def delta(request: Request, first_seq: int, *ids: int, end: RequestEnd | None = None) -> ev.Message:
    made = ev.TokenDelta(
        request_id=request.request_id, attempt=request.attempt, first_seq=first_seq, token_ids=ids, end=end
    )
    return ev.Tokens(gpu="g0", deltas=(made,))


def model(name: str, **changes: Any) -> ModelSpec:
    sizes = dict.fromkeys(
        ("params", "layers", "hidden", "heads", "kv_heads", "head_dim", "weight_bytes", "kv_bytes_per_token"),
        1,
    )
    return ModelSpec(**{"name": name, "engine": "vllm", "context_tokens": 1000, **sizes, **changes})


SUMMARY = GpuSummary(
    gpu="g0",
    host="h",
    gpu_type="H100",
    engine="vllm",
    started_ms=1.0,
    seq=1,
    state="active",
    sm_clock_mhz=1005,
    total_bytes=80,
    free_bytes=30,
    engines=(EngineSummary(model="m", state="ready"),),
)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
async def client(pool: Pool) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=pool.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gw") as made:
        yield made


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **changes}


def events(text: str) -> list[Any]:
    """The data of server-sent events, JSON decoded."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [each if each == "[DONE]" else json.loads(each) for each in found]


# ---- answers


async def test_a_chat_answer_has_text_usage_and_report(client: httpx.AsyncClient, pool: Pool) -> None:
    answer = await client.post("/v1/chat/completions", json=chat(temperature=0))
    body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "chat.completion" and body["model"] == "m"
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "Water is wet. Fire is hot."
    assert choice["finish_reason"] == "stop"
    (seen,) = pool.seen
    prompt = tuple(TOKENIZER.encode_chat([{"role": "user", "content": "hi"}]))
    assert seen.prompt_tokens == prompt and seen.max_tokens == 1000 - len(prompt)
    assert seen.sampling == {"temperature": 0.0} and seen.tenant == "default"
    assert (seen.objectives.ttft_ms, seen.objectives.tbt_ms) == (250.0, 100.0)
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ANSWER),
        "total_tokens": len(prompt) + len(ANSWER),
    }
    report = body["festina"]
    assert (report["gpu"], report["attempt"], report["energy_j"]) == ("g0", 1, 2.5)
    assert (report["energy_source"], report["queue_ms"], report["slo_met"]) == ("meter", 4.0, True)
    assert report["mean_tbt_ms"] == 10.0  # the fake clock
    assert answer.headers["x-request-id"] == seen.request_id == body["id"].removeprefix("chatcmpl-")


async def test_a_chat_stream_is_role_deltas_one_finish_usage_done(client: httpx.AsyncClient) -> None:
    wanted = chat(stream=True, stream_options={"include_usage": True})
    answer = await client.post("/v1/chat/completions", json=wanted)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]]
    assert "".join(texts) == "Water is wet. Fire is hot." and len(texts) > 4
    finishes = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert finishes == [None] * (len(finishes) - 1) + ["stop"]
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(ANSWER)
    assert chunks[-1]["festina"]["energy_j"] == 2.5
    assert len({c["id"] for c in chunks}) == 1


async def test_without_include_usage_the_report_rides_on_the_last_chunk(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=chat(stream=True))
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert [("festina" in c, "usage" in c) for c in chunks] == [(False, False)] * (len(chunks) - 1) + [
        (True, False)
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_completions_take_text_and_token_ids(client: httpx.AsyncClient, pool: Pool) -> None:
    asked = {"model": "Org/Big.1", "prompt": "Hello", "max_tokens": 3}
    body = (await client.post("/v1/completions", json=asked)).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["finish_reason"] == "length"
    text = TextStream(TOKENIZER.decoder(TOKENIZER.encode("Hello")))
    assert body["choices"][0]["text"] == text.push(ANSWER[:3]) + text.finish() != ""
    await client.post("/v1/completions", json={**asked, "prompt": [5, 6]})
    await client.post("/v1/completions", json={**asked, "prompt": [[7]]})
    await client.post("/v1/completions", json={**asked, "prompt": ["Hello"]})
    hello = tuple(TOKENIZER.encode("Hello"))
    assert [seen.prompt_tokens for seen in pool.seen] == [hello, (5, 6), (7,), hello]
    streamed = events((await client.post("/v1/completions", json={**asked, "stream": True})).text)
    streamed_text = "".join(c["choices"][0]["text"] for c in streamed[:-1])
    assert (
        streamed_text == body["choices"][0]["text"]
        and streamed[-2]["choices"][0]["finish_reason"] == "length"
    )


async def test_several_choices_have_seeds_and_are_merged(client: httpx.AsyncClient, pool: Pool) -> None:
    answer = await client.post("/v1/chat/completions", json=chat(n=3, seed=5))
    body = answer.json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert {c["message"]["content"] for c in body["choices"]} == {"Water is wet. Fire is hot."}
    assert [seen.sampling["seed"] for seen in pool.seen] == [5, 6, 7]
    call_id = answer.headers["x-request-id"]
    assert [seen.request_id for seen in pool.seen] == [f"{call_id}-{i}" for i in range(3)]
    assert body["usage"]["completion_tokens"] == 3 * len(ANSWER)
    assert body["festina"]["energy_j"] == 7.5
    chunks = events((await client.post("/v1/chat/completions", json=chat(n=2, stream=True))).text)
    finishes = [c["choices"][0]["index"] for c in chunks[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(finishes) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_work(client: httpx.AsyncClient, pool: Pool, stream: bool) -> None:
    answer = await client.post("/v1/chat/completions", json=chat(stop=" wet", stream=stream))
    if stream:
        chunks = events(answer.text)
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        report, reason = chunks[-2]["festina"], chunks[-2]["choices"][0]["finish_reason"]
    else:
        body = answer.json()
        text, reason = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]
        report = body["festina"]
        assert body["usage"]["completion_tokens"] < len(ANSWER)
    assert (text, reason) == ("Water is", "stop")
    assert (report["energy_j"], report["energy_source"]) == (2.5, "meter")  # its GPU's last word
    assert [abort.reason for abort in pool.aborted] == ["stop"]
    assert pool.core.inflight == 0


async def test_own_objectives_by_header(client: httpx.AsyncClient, pool: Pool) -> None:
    headers = {"x-festina-ttft-ms": "1234", "x-festina-tbt-ms": "5.5"}
    body = (await client.post("/v1/chat/completions", json=chat(), headers=headers)).json()
    assert (pool.seen[0].objectives.ttft_ms, pool.seen[0].objectives.tbt_ms) == (1234.0, 5.5)
    assert body["festina"]["slo_met"] is False  # the fake clock makes a token each 10 ms
    for bad in ("0", "-1", "nan", "inf", "soon"):
        answer = await client.post("/v1/chat/completions", json=chat(), headers={"x-festina-tbt-ms": bad})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-festina-tbt-ms")


# ---- failures


async def test_a_failure_before_the_first_token_has_its_status(client: httpx.AsyncClient, pool: Pool) -> None:
    pool.on_dispatch = lambda request: [
        ev.Rejected(
            request_id=request.request_id,
            attempt=1,
            status=503,
            code="no_capacity",
            message="full",
            retry_after_s=7.0,
        )
    ]
    for stream in (False, True):
        answer = await client.post("/v1/chat/completions", json=chat(stream=stream))
        assert answer.status_code == 503 and answer.headers["retry-after"] == "7"
        assert answer.json() == {
            "error": {"message": "full", "type": "server_error", "param": None, "code": "no_capacity"}
        }


async def test_a_failure_in_a_stream_is_an_error_event_without_done(
    client: httpx.AsyncClient, pool: Pool
) -> None:
    broken = RequestEnd(finish_reason="error", error="boom")
    pool.on_dispatch = lambda request: [*pool.answer(request)[:3], delta(request, 2, end=broken)]
    answer = await client.post("/v1/chat/completions", json=chat(stream=True))
    *chunks, last = events(answer.text)
    assert answer.status_code == 200 and last["error"]["code"] == "not_resumable"
    assert "boom" in last["error"]["message"]
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)


async def test_one_failed_choice_stops_the_others(client: httpx.AsyncClient, pool: Pool) -> None:
    def dispatch(request: Request) -> list[ev.Message]:
        if request.request_id.endswith("-1"):
            fields = {"status": 400, "code": "bad", "message": "no"}
            return [ev.Rejected(request_id=request.request_id, attempt=1, **fields)]
        return [admitted(request)]

    pool.on_dispatch = dispatch
    answer = await client.post("/v1/chat/completions", json=chat(n=2))
    assert answer.status_code == 400 and pool.core.inflight == 0
    assert [abort.request_id for abort in pool.aborted] == [f"{answer.headers['x-request-id']}-0"]


async def test_a_full_gateway_answers_429() -> None:
    pool = Pool(max_inflight=1, retry_after_s=3.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=pool.app), base_url="http://gw") as client:
        answer = await client.post("/v1/chat/completions", json=chat(n=2))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert pool.core.inflight == 0
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200


@pytest.mark.parametrize(
    ("name", "tenant_key"), [("M", None), ("m ", None), (" m", None), ("nope", None), ("secret", None)]
)
async def test_unknown_models_are_404_and_nothing_is_dispatched(
    client: httpx.AsyncClient, pool: Pool, name: str, tenant_key: str | None
) -> None:
    answer = await client.post("/v1/chat/completions", json=chat(model=name))
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "model_not_found",
        "invalid_request_error",
        "model",
    )
    assert pool.seen == []


async def test_context_length(client: httpx.AsyncClient, pool: Pool) -> None:
    fits = {"model": "m", "prompt": [1] * 990, "max_tokens": 10}
    assert (await client.post("/v1/completions", json=fits)).status_code == 200
    for asked in (
        {**fits, "max_tokens": 11},
        {"model": "m", "prompt": [1] * 1000},
        {**fits, "min_tokens": 11},
    ):
        answer = await client.post("/v1/completions", json=asked)
        assert answer.status_code == 400
    answer = await client.post("/v1/completions", json={**fits, "max_tokens": 11})
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "1000" in error["message"] and "990" in error["message"] and "11" in error["message"]


async def test_token_ids_outside_the_vocabulary(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"model": "m", "prompt": [TOKENIZER.vocab_size]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    answer = await client.post("/v1/chat/completions", json=chat(logit_bias={"99999999": 1}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


async def test_bodies_too_large_are_413() -> None:
    pool = Pool(max_body_bytes=200)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 100

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=pool.app), base_url="http://gw") as client:
        declared = await client.post("/v1/chat/completions", content=b" " * 201)
        streamed = await client.post("/v1/chat/completions", content=parts())
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
    for answer in (declared, streamed):
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_prompt_too_long_for_the_bus_is_413() -> None:
    pool = Pool(max_prompt_tokens=5)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=pool.app), base_url="http://gw") as client:
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": [1] * 6})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "prompt_too_long")
        assert (
            await client.post("/v1/completions", json={"model": "m", "prompt": [1] * 5})
        ).status_code == 200


async def test_framework_errors_have_the_same_shape(client: httpx.AsyncClient, pool: Pool) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405)):
        answer = await client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
    pool.gateway.missing = None  # type: ignore[assignment]  # any fault at all
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


# ---- clients that leave


async def leave_during(pool: Pool, body: dict[str, Any], when: Callable[[list[Any]], bool]) -> list[Any]:
    """Send a request by hand; disconnect as soon as `when` holds of what was sent to the client."""
    sent: list[Any] = []
    inbound: asyncio.Queue[Any] = asyncio.Queue()
    inbound.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("gw", 80),
        "client": ("c", 1),
    }
    serving = asyncio.create_task(pool.app(scope, inbound.get, send))  # type: ignore[arg-type]
    async with asyncio.timeout(2):
        while not when(sent):
            await asyncio.sleep(0.001)
        inbound.put_nowait({"type": "http.disconnect"})
        await serving
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [0, 3])
async def test_a_client_that_leaves_stops_the_engine(pool: Pool, stream: bool, given: int) -> None:
    pool.silent_after(given)
    sent = await leave_during(pool, chat(stream=stream), lambda _: bool(pool.seen) and not pool.playing)
    assert bool(sent) == (stream and given > 0)
    assert pool.core.inflight == 0
    assert [abort.request_id for abort in pool.aborted] == [pool.seen[0].request_id]


async def test_a_client_that_leaves_before_any_gpu_took_its_request(pool: Pool) -> None:
    pool.on_dispatch = lambda request: []
    sent = await leave_during(pool, chat(), lambda sent: bool(pool.seen))
    assert sent == [] and pool.core.inflight == 0
    pool.feed(admitted(pool.seen[0]))
    assert len(pool.aborted) == 1


async def test_a_client_that_reads_too_slowly_is_cut_off() -> None:
    pool = Pool(stream_buffer=4)
    pool.on_dispatch = lambda request: [admitted(request), delta(request, 0, *ANSWER[:1])]
    sending, stuck = asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        sending.set()
        await stuck.wait()

    inbound: asyncio.Queue[Any] = asyncio.Queue()
    body = json.dumps(chat(stream=True)).encode()
    inbound.put_nowait({"type": "http.request", "body": body, "more_body": False})
    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    serving = asyncio.create_task(pool.app(scope, inbound.get, send))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        await sending.wait()
        for i in range(1, 20):
            pool.feed(delta(pool.seen[0], i, ANSWER[0]))
        while not pool.aborted:
            await asyncio.sleep(0.001)
        assert pool.core.inflight == 0
        assert pool.aborted[0].reason == "the client reads too slowly"
        stuck.set()
        await serving


# ---- keys, health, models, admin, traces


async def test_keys_name_the_tenant_and_guard_models_and_admin(client: httpx.AsyncClient, pool: Pool) -> None:
    pool.keys.set_stored({digest_of("ka"): "team-a", digest_of("root"): "admin"})
    for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "ka"}):
        answer = await client.post("/v1/chat/completions", json=chat(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.get("/v1/models", headers=headers)).status_code == 401
    team = {"authorization": "Bearer ka"}
    root = {"authorization": "Bearer root"}
    assert (
        await client.post("/v1/chat/completions", json=chat(model="secret"), headers=team)
    ).status_code == 200
    assert pool.seen[-1].tenant == "team-a"
    assert (
        await client.post("/v1/chat/completions", json=chat(model="secret"), headers=root)
    ).status_code == 404
    assert (await client.get("/admin/gpus", headers=team)).status_code == 403
    assert (await client.get("/admin/gpus", headers=root)).status_code == 200
    assert (await client.get("/health")).status_code == 200


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [(m["id"], m["object"], m["state"]) for m in listed["data"]] == [
        ("m", "model", "ready"),
        ("Org/Big.1", "model", "cold"),
    ]
    assert (await client.get("/v1/models/Org/Big.1")).json()["id"] == "Org/Big.1"
    assert (await client.get("/v1/models/org/big.1")).json()["error"]["code"] == "model_not_found"


async def test_ready_names_what_is_missing(client: httpx.AsyncClient, pool: Pool) -> None:
    assert (await client.get("/ready")).status_code == 200
    pool.store_up = False
    pool.feed(ev.BusLost())
    pool.core.registry.silent.add("g0")
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["missing"]) == (503, ["bus", "store", "gpu"])
    pool.gateway.draining = True
    answer = await client.post("/v1/chat/completions", json=chat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert (await client.get("/health")).status_code == 200


async def test_admin_models(client: httpx.AsyncClient, pool: Pool) -> None:
    shape = dict.fromkeys(("params", "layers", "hidden", "heads", "kv_heads", "head_dim"), 1)
    spec = {"name": "New.1", "engine": "emulated", **shape, "weight_bytes": 5, "kv_bytes_per_token": 2}
    assert (await client.post("/admin/models", json=spec)).status_code == 201
    assert isinstance(pool.sent[-1].message, ev.ModelRegistered)
    assert (await client.post("/admin/models", json=spec)).status_code == 201  # identical
    listed = (await client.get("/admin/models")).json()["models"]
    (found,) = [m for m in listed if m["name"] == "New.1"]
    assert (found["state"], found["gpus"], found["keep_alive_ms"]) == ("cold", [], 60_000.0)
    assert (await client.post("/admin/models", json=found)).status_code == 201  # as listed
    for changes in ({"layers": 2}, {"name": "new-1"}):
        answer = await client.post("/admin/models", json={**spec, **changes})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_exists")
    for changes, param in (
        ({"engine": "x"}, "engine"),
        ({"layers": 0}, "layers"),
        ({"layer": 1}, "layer"),
        ({"name": " a"}, "name"),
        ({"engine": "vllm", "name": "v"}, "weights"),
        ({"layers": "many"}, None),
    ):
        answer = await client.post("/admin/models", json={**spec, **changes})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await client.delete("/admin/models/New.1")).status_code == 200
    assert isinstance(pool.sent[-1].message, ev.ModelRemoved)
    assert (await client.delete("/admin/models/New.1")).status_code == 404


async def test_admin_gpus(client: httpx.AsyncClient, pool: Pool) -> None:
    (gpu,) = (await client.get("/admin/gpus")).json()["gpus"]
    assert (gpu["gpu"], gpu["state"], gpu["sm_clock_mhz"], gpu["power_w"]) == ("g0", "active", 1005, None)
    assert gpu["engines"][0]["model"] == "m" and gpu["engines"][0]["queued"] == 0
    assert (await client.post("/admin/gpus/g0/drain")).status_code == 202
    assert pool.sent[-1] == ev.Send(to="g0", message=ev.Drain(gpu="g0", on=True))
    assert (await client.post("/admin/gpus/g0/undrain")).status_code == 202
    assert pool.sent[-1] == ev.Send(to="g0", message=ev.Drain(gpu="g0", on=False))
    assert (await client.post("/admin/gpus/g9/drain")).status_code == 404


async def test_one_trace_from_client_to_engine(client: httpx.AsyncClient, pool: Pool) -> None:
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    await client.post("/v1/chat/completions", json=chat(), headers={"traceparent": parent})
    (span,) = pool.exporter.get_finished_spans()
    assert span.name == "gateway.request" and span.parent is not None
    assert trace.format_span_id(span.parent.span_id) == "cd" * 8
    own = span.get_span_context()
    assert pool.seen[0].traceparent == f"00-{'ab' * 16}-{trace.format_span_id(own.span_id)}-01"
    assert span.attributes is not None
    assert span.attributes["festina.model"] == "m" and span.attributes["festina.energy_j"] == 2.5
    assert span.attributes["gen_ai.usage.output_tokens"] == len(ANSWER)
    await client.post("/v1/chat/completions", json=chat(model="nope"))
    assert pool.exporter.get_finished_spans()[-1].status.description == "model_not_found"


async def test_the_api_describes_itself(client: httpx.AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "messages" in body["content"]["application/json"]["schema"]["properties"]
