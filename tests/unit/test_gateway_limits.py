"""Limits of tenants: counting a minute, holding several gateways to it, and doing without the store."""

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import quota as quota_module
from services.gateway.auth import read_tenants
from services.gateway.limits import Decision, Tenants, Window, headers_of
from services.gateway.quota import Quota
from shared.errors import ConfigError, InvalidRequest, Unavailable
from shared.model import Tenant


@pytest.fixture(autouse=True)
def no_store_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever answers here answers at once, however busy the machine is."""
    monkeypatch.setattr(quota_module, "WITHIN_S", 10.0)


def tenant(**limits: Any) -> Tenant:
    return Tenant(name="t", **limits)


# ---- a minute


def test_requests_of_a_minute() -> None:
    window, limited = Window(), tenant(requests_per_minute=2)
    assert window.decide(limited, 100.5, 1, 0).remaining_requests == 1
    assert window.decide(limited, 130.0, 1, 0).remaining_requests == 0
    refused = window.decide(limited, 150.0, 1, 0)
    assert (refused.refused, refused.retry_after_s) == ("requests", 11.0)  # slot 100 counts until 161
    assert refused.reset_requests_s == 41.0
    assert window.decide(limited, 160.9, 1, 0).refused == "requests"
    assert window.decide(limited, 161.0, 1, 0).refused == ""


def test_tokens_of_a_minute_are_corrected_when_a_call_ends() -> None:
    window, limited = Window(), tenant(tokens_per_minute=100)
    first = window.decide(limited, 10.0, 80, 0)
    assert (first.remaining_tokens, first.remaining_requests) == (20, -1)
    assert window.decide(limited, 20.0, 30, 0).refused == "tokens"
    window.add(first.slot, 0, 40 - 80)  # it took only 40
    assert window.decide(limited, 20.0, 30, 0).remaining_tokens == 30
    too_large = window.decide(limited, 20.0, 101, 0)
    assert (too_large.refused, too_large.retry_after_s) == ("tokens", None)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 30)), max_size=80), st.integers(1, 6))
def test_no_minute_ever_sees_more_than_the_limit(script: list[tuple[float, int]], limit: int) -> None:
    window, limited = Window(), tenant(requests_per_minute=limit, tokens_per_minute=60)
    now_s, taken = 1000.0, []
    for gap_s, tokens in script:
        now_s += gap_s
        decision = window.decide(limited, now_s, tokens, 0)
        recent = [n for at_s, n in taken if now_s - at_s < 60.0]
        if not decision.refused:
            taken.append((now_s, tokens))
            assert len(recent) < limit and sum(recent) + tokens <= 60
        else:  # it is refused for a reason, give or take the second that slots are wide
            wide = [n for at_s, n in taken if now_s - at_s < 61.0]
            assert len(wide) >= limit or sum(wide) + tokens > 60
            assert decision.retry_after_s is not None and 0.0 < decision.retry_after_s <= 61.0
            later_s = now_s + decision.retry_after_s
            assert not Window(dict(window.slots)).decide(limited, later_s, tokens, 0).refused or (
                decision.refused == "requests" and sum(wide) + tokens > 60
            )


def test_headers() -> None:
    decision = Decision(remaining_requests=7, reset_requests_s=1.5, remaining_tokens=-3)
    assert headers_of(tenant(requests_per_minute=10), decision) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "7",
        "x-ratelimit-reset-requests": "1.500s",
    }
    assert headers_of(tenant(tokens_per_minute=9), decision)["x-ratelimit-remaining-tokens"] == "0"
    assert headers_of(tenant(), decision) == {}


# ---- the table


def test_tenants_of_a_file(tmp_path: Any) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[keys]\nk = "a"\n[tenants.a]\nrequests_per_minute = 5\nweight = 2.0\n')
    table = Tenants(read_tenants(str(path)))
    table.set_stored([Tenant(name="a", requests_per_minute=9), Tenant(name="b", max_concurrent=1)])
    assert table.get("a") == Tenant(name="a", requests_per_minute=5, weight=2.0)
    assert table.get("b").max_concurrent == 1 and table.get("c") == Tenant(name="c")
    assert "file" in table.conflict(Tenant(name="a")) and "too like" in table.conflict(Tenant(name="B"))
    assert table.conflict(Tenant(name="b")) == "" == table.conflict(Tenant(name="new"))


@pytest.mark.parametrize("line", ["rpm = 1", "weight = 0.0", "max_concurrent = 0", 'weight = "x"'])
def test_malformed_limits_are_refused(tmp_path: Any, line: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys]\nk = "a"\n[tenants.a]\n{line}\n')
    with pytest.raises(ConfigError, match=r"tenants\.a"):
        read_tenants(str(path))


# ---- with a store that answers slowly, or not at all


class Counts:
    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def __call__(self, name: str, labels: Any, value: float) -> None:
        self.of[name] = self.of.get(name, 0.0) + value


async def refused(quota: Quota, asked: Tenant, tokens: int = 1) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await quota.take(asked, tokens)
    return caught.value


async def away(script: str, keys: list[str], args: list[Any]) -> Any:
    raise Unavailable("no")


async def test_a_tenant_without_limits_asks_nobody() -> None:
    assert await Quota("g", away, Counts()).take(tenant(weight=3.0), 1) is None


async def test_without_the_store_a_gateway_keeps_to_its_part() -> None:
    counts = Counts()
    quota, limited = Quota("g", away, counts), tenant(requests_per_minute=5)
    quota.gateways = 2
    assert [await quota.take(limited, 1) for _ in range(2)]
    error = await refused(quota, limited)
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.retry_after_s is not None and 59.0 < error.retry_after_s <= 61.0
    assert quota.alone and counts.of["gateway_limits_alone"] == 3


async def test_a_store_that_hangs_holds_a_call_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_module, "WITHIN_S", 0.1)

    async def hang(script: str, keys: list[str], args: list[Any]) -> Any:
        await asyncio.sleep(30)

    quota, limited = Quota("g", hang, Counts()), tenant(requests_per_minute=100)
    started_s = time.monotonic()
    await asyncio.gather(*(quota.take(limited, 1) for _ in range(10)))
    await quota.take(limited, 1)
    assert time.monotonic() - started_s < 10.0  # it would hang for half a minute, or that for each call


async def test_places_without_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    quota, limited = Quota("g", away, Counts()), tenant(max_concurrent=2)
    first = await quota.take(limited, 1)
    assert first is not None and await quota.take(limited, 1)
    assert (await refused(quota, limited)).retry_after_s == 1.0
    quota.give_back(first, 1)
    assert await quota.take(limited, 1)


async def test_what_was_taken_alone_is_told_to_the_store_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quota_module, "AWAY_S", 0.02)
    told: list[list[Any]] = []
    up = False

    async def run(script: str, keys: list[str], args: list[Any]) -> Any:
        if not up:
            raise Unavailable("no")
        told.append(args)
        needs = args[7 + 3 * args[6] :]
        return [[int(time.time()), 90, 60_000, 0, 0], [[b"", 0] for _ in needs]]

    quota, limited = Quota("g", run, Counts()), tenant(requests_per_minute=100)
    ticket = await quota.take(limited, 7)
    up = True
    await asyncio.sleep(0.03)
    assert await quota.take(limited, 1)
    gateway, _alive_s, held, *limits = told[0][:6]
    assert (gateway, held, limits) == ("g", 1, [100, -1, -1])
    assert told[0][6:] == [1, ticket.slot, 1, 7, 1]  # type: ignore[union-attr]  # one correction, one call


async def test_a_flood_beyond_the_minute_does_not_reach_the_store() -> None:
    asked = 0

    async def run(script: str, keys: list[str], args: list[Any]) -> Any:
        nonlocal asked
        asked += 1
        return [[int(time.time()), 0, 60_000, 0, 0], [[b"requests", 30_000] for _ in args[7:]]]

    quota, limited = Quota("g", run, Counts()), tenant(requests_per_minute=1)
    first = await refused(quota, limited)
    again = [await refused(quota, limited) for _ in range(50)]
    assert asked == 1 and first.headers["x-ratelimit-remaining-requests"] == "0"
    assert all(29.0 < error.retry_after_s <= 30.0 for error in again if error.retry_after_s)
    await refused(quota, tenant(requests_per_minute=2))  # its limits have changed: asked anew
    assert asked == 2
