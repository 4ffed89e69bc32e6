"""Several gateways, one store: the limits of a tenant hold over all of them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support import Servers, eventually

from services.gateway import quota as quota_module
from services.gateway.quota import Quota, Ticket
from shared.errors import InvalidRequest
from shared.model import Tenant
from shared.store import Store


@pytest.fixture
async def quotas(servers: Servers) -> AsyncIterator[list[Quota]]:
    servers.flush()
    stores = [Store(servers.settings) for _ in range(2)]
    for store in stores:
        await store.connect()
    yield [Quota(f"g{i}", store.run, lambda *_: None) for i, store in enumerate(stores)]
    for store in stores:
        await store.close()


async def attempt(quota: Quota, tenant: Tenant, tokens: int = 1) -> Ticket | InvalidRequest:
    try:
        ticket = await quota.take(tenant, tokens)
    except InvalidRequest as error:
        return error
    assert ticket is not None
    return ticket


async def workers(quotas: list[Quota], tenant: Tenant, each: int) -> list[Any]:
    """Four workers at each gateway, who all call so many times."""

    async def work(quota: Quota) -> list[Any]:
        return [await attempt(quota, tenant) for _ in range(each)]

    found = await asyncio.gather(*(work(quota) for quota in quotas for _ in range(4)))
    return [result for results in found for result in results]


async def test_two_gateways_with_four_workers_each_admit_ten_of_ten_a_minute(quotas: list[Quota]) -> None:
    results = await workers(quotas, Tenant(name="t", requests_per_minute=10), each=25)
    admitted = [r for r in results if isinstance(r, Ticket)]
    errors = [r for r in results if isinstance(r, InvalidRequest)]
    assert (len(admitted), len(errors)) == (10, 190)
    assert all(e.code == "rate_limit_exceeded" and 0 < e.retry_after_s <= 61 for e in errors)
    left = sorted(int(ticket.headers["x-ratelimit-remaining-requests"]) for ticket in admitted)
    assert left[0] == 0 and all(0 <= n < 10 for n in left)


async def test_tokens_are_shared_and_come_back(quotas: list[Quota]) -> None:
    tenant = Tenant(name="t", tokens_per_minute=100)
    first = await attempt(quotas[0], tenant, 60)
    assert isinstance(first, Ticket)
    assert isinstance(await attempt(quotas[1], tenant, 60), InvalidRequest)
    quotas[0].give_back(first, used_tokens=30)
    await asyncio.sleep(0.05)
    second = await attempt(quotas[1], tenant, 60)
    assert isinstance(second, Ticket) and second.headers["x-ratelimit-remaining-tokens"] == "10"
    too_large = await attempt(quotas[0], tenant, 101)
    assert isinstance(too_large, InvalidRequest) and too_large.retry_after_s is None


async def test_places_are_shared_and_a_dead_gateways_come_back(
    quotas: list[Quota], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_module, "ALIVE_S", 1)
    tenant = Tenant(name="t", max_concurrent=5)
    results = await workers([quotas[0]], tenant, each=5)
    assert sum(isinstance(r, Ticket) for r in results) == 5
    assert isinstance(await attempt(quotas[1], tenant), InvalidRequest)
    await asyncio.sleep(2.1)  # the first gateway has not renewed: it is dead
    fresh = [await attempt(quotas[1], tenant) for _ in range(6)]
    assert sum(isinstance(r, Ticket) for r in fresh) == 5


async def test_a_place_given_back_is_free_at_once_everywhere(quotas: list[Quota]) -> None:
    tenant = Tenant(name="t", max_concurrent=1)
    for turn in range(20):
        ticket = await attempt(quotas[turn % 2], tenant)
        assert isinstance(ticket, Ticket), turn
        quotas[turn % 2].give_back(ticket, 1)
        await asyncio.sleep(0.02)


async def test_the_store_goes_and_comes_back(
    quotas: list[Quota], servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_module, "AWAY_S", 0.2)
    tenant = Tenant(name="t", requests_per_minute=20)
    for quota in quotas:
        await quota.renew()
    await quotas[0].renew()
    assert [quota.gateways for quota in quotas] == [2, 2]
    assert isinstance(await attempt(quotas[0], tenant), Ticket)
    servers.stop("store")
    results = [await attempt(quotas[i % 2], tenant) for i in range(60)]
    assert sum(isinstance(r, Ticket) for r in results) == 9 + 10  # each its half, less what it had
    assert all(quota.alone for quota in quotas)
    servers.start("store")

    async def settle() -> None:
        for quota in quotas:
            await quota.renew()
            await attempt(quota, tenant)

    for _ in range(50):
        await asyncio.sleep(0.1)
        await settle()
        if not any(quota.alone for quota in quotas):
            break
    await eventually(lambda: not any(quota.alone for quota in quotas))
    after = [await attempt(quotas[i % 2], tenant) for i in range(10)]
    assert sum(isinstance(r, Ticket) for r in after) <= 1  # the store has heard of what was taken
