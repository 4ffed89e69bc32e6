"""Limits of tenants at the API: answers, headers, and the admin's routes."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from test_gateway_api import ANSWER, Pool, chat

from services.gateway.auth import digest_of
from shared import events as ev
from shared.model import Tenant

HEADERS = {"x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"}


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
async def client(pool: Pool) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=pool.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gw") as made:
        yield made


async def post(client: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=chat(**changes))


async def test_requests_per_minute(client: httpx.AsyncClient, pool: Pool) -> None:
    assert not HEADERS & set((await post(client)).headers)
    pool.gateway.tenants.put(Tenant(name="default", requests_per_minute=2))
    answers = [await post(client, stream=stream) for stream in (False, True, False)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["1", "0", "0"]
    assert all(set(a.headers) >= HEADERS for a in answers)
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert answers[2].json()["error"]["type"] == "rate_limit_error"
    assert 55 <= int(answers[2].headers["retry-after"]) <= 61
    assert len(pool.seen) == 3  # the refused one went nowhere


async def test_tokens_count_as_asked_and_then_as_used(client: httpx.AsyncClient, pool: Pool) -> None:
    pool.gateway.tenants.put(Tenant(name="default", tokens_per_minute=300))
    first = await post(client, max_tokens=200)
    used = first.json()["usage"]["total_tokens"]
    assert used < 100
    prompt = first.json()["usage"]["prompt_tokens"]
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 300 - prompt - 200
    assert (await post(client, max_tokens=200)).status_code == 200  # what the first did not use is back
    refused = await post(client, max_tokens=299)
    assert refused.status_code == 429 and "retry-after" not in refused.headers  # never, whatever one waits


async def test_one_at_a_time(client: httpx.AsyncClient, pool: Pool) -> None:
    pool.gateway.tenants.put(Tenant(name="default", max_concurrent=1))
    for _ in range(3):
        assert (await post(client)).status_code == 200
    pool.on_dispatch = lambda request: []
    task = pool.gateway.quota.take(pool.gateway.tenants.get("default"), 1)
    held = await task
    refused = await post(client)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert held is not None
    pool.gateway.quota.give_back(held, 1)
    pool.on_dispatch = pool.answer
    assert (await post(client)).status_code == 200


async def test_malformed_requests_do_not_count(client: httpx.AsyncClient, pool: Pool) -> None:
    pool.gateway.tenants.put(Tenant(name="default", requests_per_minute=1))
    for _ in range(5):
        assert (await post(client, model="nope")).status_code == 404
        assert (await post(client, max_tokens=0)).status_code == 400
    assert (await post(client)).status_code == 200


async def test_a_request_that_was_not_served_uses_no_tokens(client: httpx.AsyncClient, pool: Pool) -> None:
    pool.gateway.tenants.put(Tenant(name="default", tokens_per_minute=300))
    pool.on_dispatch = lambda request: [
        ev.Rejected(request_id=request.request_id, attempt=1, status=429, code="overloaded", message="m")
    ]
    for _ in range(4):
        answer = await post(client, max_tokens=200)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")


async def test_the_weight_travels_with_the_request(client: httpx.AsyncClient, pool: Pool) -> None:
    pool.gateway.tenants.put(Tenant(name="default", weight=2.5))
    assert (await post(client)).status_code == 200
    assert pool.seen[0].tenant_weight == 2.5 and len(ANSWER) > 1


async def test_one_tenants_limit_is_not_anothers(client: httpx.AsyncClient, pool: Pool) -> None:
    pool.keys.set_stored({digest_of("ka"): "a", digest_of("kb"): "b"})
    pool.gateway.tenants.put(Tenant(name="a", requests_per_minute=1))
    a, b = {"authorization": "Bearer ka"}, {"authorization": "Bearer kb"}
    asked = {"url": "/v1/chat/completions", "json": chat()}
    codes = [(await client.post(**asked, headers=h)).status_code for h in (a, a, b, b, a)]
    assert codes == [200, 429, 200, 200, 429]


async def test_admin_tenants(client: httpx.AsyncClient, pool: Pool) -> None:
    limits = {"requests_per_minute": 5, "weight": 2}
    assert (await client.put("/admin/tenants/Team A", json=limits)).status_code == 200
    listed = (await client.get("/admin/tenants")).json()["tenants"]
    wanted = {"tokens_per_minute": None, "max_concurrent": None, "weight": 2.0}
    assert listed == [{"name": "Team A", "requests_per_minute": 5, **wanted}]
    for body, param in (
        ({"rpm": 1}, "rpm"),
        ({"weight": 0}, "weight"),
        ({"max_concurrent": 0}, "max_concurrent"),
    ):
        answer = await client.put("/admin/tenants/x", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = await client.put("/admin/tenants/team-a", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "tenant_conflict")
    pool.keys.set_stored({digest_of("ka"): "a"})
    answer = await client.put("/admin/tenants/a", json={}, headers={"authorization": "Bearer ka"})
    assert answer.status_code == 403
