"""Holds all gateways together to each tenant's limits, by one atomic script in the store.

Calls that come while the script is on its way are decided by the next one together, so the store is asked
once per round trip and not once per call, and a tenant without limits costs nothing. While the store does not
answer, each gateway decides alone, by its part of the limits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from services.gateway.limits import (
    CONCURRENT,
    REQUESTS,
    TOKENS,
    Decision,
    Window,
    headers_of,
    is_limited,
    refusal,
)
from shared.errors import Unavailable
from shared.model import Tenant
from shared.subjects import GATEWAYS_KEY, limit_key

WITHIN_S = 0.1  # the store answers in this time, or the gateway decides alone
AWAY_S = 1.0  # so long after that before the store is asked again
ALIVE_S = 10  # a gateway not seen for this long holds no places and no part

# KEYS: requests and tokens by second, places by gateway. ARGV: gateway, seconds it counts as alive, places it
# holds, limits of requests, tokens, places (-1: none), number of corrections, (slot, requests, tokens) of
# each, then the tokens that each call asks for. Returns the state of both windows and [verdict, retry ms] per
# call.
SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1])
local now_ms = now * 1000 + math.floor(tonumber(time[2]) / 1000)
local limits = {tonumber(ARGV[4]), tonumber(ARGV[5])}
local most_places = tonumber(ARGV[6])
local at = 8
for _ = 1, tonumber(ARGV[7]) do
  local slot = math.min(tonumber(ARGV[at]), now)
  for which = 1, 2 do
    local amount = tonumber(ARGV[at + which])
    if limits[which] >= 0 and amount ~= 0 and slot >= now - 60 then
      redis.call('HINCRBY', KEYS[which], slot, amount)
    end
  end
  at = at + 3
end
local slots, used = {{}, {}}, {0, 0}
for which = 1, 2 do
  local flat = limits[which] >= 0 and redis.call('HGETALL', KEYS[which]) or {}
  for i = 1, #flat, 2 do
    local slot, amount = tonumber(flat[i]), tonumber(flat[i + 1])
    if slot < now - 60 or amount <= 0 then
      redis.call('HDEL', KEYS[which], flat[i])
    else
      table.insert(slots[which], {slot, amount})
      used[which] = used[which] + amount
    end
  end
  table.sort(slots[which], function(a, b) return a[1] < b[1] end)
end
local held, others = tonumber(ARGV[3]), 0
if most_places >= 0 then
  local flat = redis.call('HGETALL', KEYS[3])
  for i = 1, #flat, 2 do
    local places, expires = string.match(flat[i + 1], '(%d+):(%d+)')
    if tonumber(expires) < now then
      redis.call('HDEL', KEYS[3], flat[i])
    elseif flat[i] ~= ARGV[1] then
      others = others + tonumber(places)
    end
  end
end
local function freed_ms(which, amount)
  for _, taken in ipairs(slots[which]) do
    amount = amount - taken[2]
    if amount <= 0 then return (taken[1] + 61) * 1000 - now_ms end
  end
  return -1
end
local function verdict(needs)
  if most_places >= 0 and held + others >= most_places then return {'concurrent', 1000} end
  for which, name in ipairs({'requests', 'tokens'}) do
    local excess = used[which] + needs[which] - limits[which]
    if limits[which] >= 0 and excess > 0 then return {name, freed_ms(which, excess)} end
  end
  held = held + 1
  for which = 1, 2 do
    if limits[which] >= 0 and needs[which] > 0 then
      redis.call('HINCRBY', KEYS[which], now, needs[which])
      used[which] = used[which] + needs[which]
      table.insert(slots[which], {now, needs[which]})
    end
  end
  return {'', 0}
end
local verdicts = {}
for i = at, #ARGV do
  table.insert(verdicts, verdict({1, tonumber(ARGV[i])}))
end
local state = {now}
for which = 1, 2 do
  local newest = slots[which][#slots[which]]
  table.insert(state, limits[which] - used[which])
  table.insert(state, newest and (newest[1] + 61) * 1000 - now_ms or 0)
  if newest then redis.call('EXPIRE', KEYS[which], 61) end
end
if most_places >= 0 then
  if held > 0 then
    redis.call('HSET', KEYS[3], ARGV[1], held .. ':' .. (now + ARGV[2]))
    redis.call('EXPIRE', KEYS[3], ARGV[2])
  else
    redis.call('HDEL', KEYS[3], ARGV[1])
  end
end
return {state, verdicts}
"""

# Notes that a gateway is alive, and returns how many are.
PRESENCE = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. (now - ARGV[2]))
return redis.call('ZCARD', KEYS[1])
"""

Run = Callable[[str, list[str], list[Any]], Awaitable[Any]]
Count = Callable[[str, Mapping[str, str], float], None]


@dataclass(eq=False)
class Ticket:
    """A call that is within its tenant's limits, until it is given back."""

    tenant: Tenant
    tokens: int
    slot: int
    headers: dict[str, str]


@dataclass(eq=False)
class _Meter:
    """What this gateway counts of one tenant.

    Args:
        held: calls in progress here.
        taken: what was taken here in the last minute.
        owed: corrections that the store has not heard of.
        asks: (tokens, answer) of the calls that wait for the store.
        told: whether the store knows of `held`.
        refused_until_s, refused: until then no request fits in the minute, and how that was put.
    """

    tenant: Tenant
    held: int = 0
    taken: Window = field(default_factory=Window)
    owed: Window = field(default_factory=Window)
    asks: list[tuple[int, asyncio.Future[Decision]]] = field(default_factory=list)
    told: bool = True
    busy: bool = False
    refused_until_s: float = 0.0
    refused: Decision = field(default_factory=Decision)


class Quota:
    """The limits of all tenants, as one gateway keeps them.

    Args:
        gateway: this gateway's id.
        run: runs a script in the store; raises Unavailable.
        count: adds to a counter of the metrics.
    """

    def __init__(self, gateway: str, run: Run, count: Count) -> None:
        self.gateways = 1
        self._gateway = gateway
        self._run = run
        self._count = count
        self._meters: dict[str, _Meter] = {}
        self._alone_until_s = 0.0
        self._settling: set[asyncio.Task[None]] = set()

    @property
    def alone(self) -> bool:
        """Whether the store is away, and this gateway decides by its part of the limits."""
        return time.monotonic() < self._alone_until_s

    @property
    def places(self) -> int:
        """Calls in progress here of tenants that have limits."""
        return sum(meter.held for meter in self._meters.values())

    @property
    def corrections(self) -> int:
        """Seconds of the past minute whose counts the store has yet to be told of."""
        return sum(len(meter.owed.slots) for meter in self._meters.values())

    def refuse_early(self, tenant: Tenant) -> None:
        """Raise InvalidRequest (429) if it is known already that no request fits in the minute.

        Nothing frees a place in it before its time, so a flood is answered without asking the store.
        """
        meter = self._meters.get(tenant.name)
        if meter is None or meter.tenant != tenant:
            return
        left_s = meter.refused_until_s - time.monotonic()
        if left_s > 0.0:
            self._refuse(tenant, replace(meter.refused, retry_after_s=left_s, reset_requests_s=left_s), 0)

    async def take(self, tenant: Tenant, tokens: int) -> Ticket | None:
        """Count a call of so many tokens; None for a tenant without limits.

        Raises:
            InvalidRequest: 429, a limit is reached.
        """
        if not is_limited(tenant):
            return None
        meter = self._meter(tenant)
        self.refuse_early(tenant)
        if self.alone:
            decision = self._decide_alone(meter, tokens)
        else:
            answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
            meter.asks.append((tokens, answer))
            self._settle_soon(meter)
            decision = await answer
        if decision.refused:
            self._note_refused(meter, decision)
            self._refuse(tenant, decision, tokens)
        return Ticket(tenant, tokens, decision.slot, headers_of(tenant, decision))

    def give_back(self, ticket: Ticket, used_tokens: int) -> None:
        """End a call: its place is free again, and it counts for the tokens that it used."""
        meter = self._meter(ticket.tenant)
        meter.held -= 1
        meter.told = False
        self._correct(meter, ticket.slot, used_tokens - ticket.tokens)
        self._settle_soon(meter)

    async def renew(self) -> None:
        """Tell the store that this gateway and its calls are alive; to be called every few seconds."""
        for name, meter in list(self._meters.items()):
            meter.taken.prune(int(time.time()))
            if not (meter.held or meter.asks or meter.taken.slots or meter.busy):
                del self._meters[name]
            elif meter.held or meter.owed.slots:
                meter.told = False
                self._settle_soon(meter)
        try:
            self.gateways = await self._run(PRESENCE, [GATEWAYS_KEY], [self._gateway, ALIVE_S])
        except Unavailable:
            self._alone_until_s = time.monotonic() + AWAY_S

    def _meter(self, tenant: Tenant) -> _Meter:
        meter = self._meters.setdefault(tenant.name, _Meter(tenant))
        if meter.tenant != tenant:  # its limits have changed
            meter.tenant, meter.refused_until_s = tenant, 0.0
        return meter

    def _note_refused(self, meter: _Meter, decision: Decision) -> None:
        if decision.refused == REQUESTS and decision.retry_after_s is not None and not self.alone:
            meter.refused_until_s = time.monotonic() + decision.retry_after_s
            meter.refused = decision

    def _refuse(self, tenant: Tenant, decision: Decision, tokens: int) -> None:
        self._count("gateway_limited", {"tenant": tenant.name, "limit": decision.refused}, 1.0)
        raise refusal(tenant, decision, tokens)

    def _correct(self, meter: _Meter, slot: int, tokens: int) -> None:
        if tokens:
            meter.owed.add(slot, 0, tokens)
            meter.taken.add(slot, 0, tokens)

    # ---- with the store

    def _settle_soon(self, meter: _Meter) -> None:
        if not meter.busy and not self.alone:
            meter.busy = True
            task = asyncio.create_task(self._settle(meter))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _settle(self, meter: _Meter) -> None:
        """Ask the store until nobody waits and it knows all; one question at a time per tenant."""
        try:
            while meter.asks or meter.owed.slots or not meter.told:
                asks, owed = meter.asks, meter.owed
                meter.asks, meter.owed, meter.told = [], Window(), True
                try:
                    decisions = await self._ask(meter, [tokens for tokens, _ in asks], owed)
                except (Unavailable, TimeoutError):
                    self._alone_until_s = time.monotonic() + AWAY_S
                    self._owe(meter, owed)
                    asks, meter.asks = asks + meter.asks, []
                    decisions = [self._decide_alone(meter, tokens) for tokens, _ in asks]
                self._answer(meter, asks, decisions)
                if self.alone:
                    break
        finally:
            meter.busy = False

    def _answer(
        self, meter: _Meter, asks: list[tuple[int, asyncio.Future[Decision]]], decisions: list[Decision]
    ) -> None:
        for (tokens, answer), decision in zip(asks, decisions, strict=True):
            if not answer.done():
                answer.set_result(decision)
            elif not decision.refused:  # whoever asked was cancelled meanwhile
                self.give_back(Ticket(meter.tenant, tokens, decision.slot, {}), 0)

    async def _ask(self, meter: _Meter, needs: list[int], owed: Window) -> list[Decision]:
        tenant = meter.tenant
        limits = (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_concurrent)
        corrections = [n for slot, taken in owed.slots.items() for n in (slot, *taken)]
        args: list[Any] = [self._gateway, ALIVE_S, meter.held]
        args += [-1 if limit is None else limit for limit in limits]
        args += [len(owed.slots), *corrections, *needs]
        keys = [limit_key(tenant.name, counted) for counted in (REQUESTS, TOKENS, CONCURRENT)]
        state, verdicts = await asyncio.wait_for(self._run(SCRIPT, keys, args), WITHIN_S)
        slot, left_requests, reset_requests_ms, left_tokens, reset_tokens_ms = state
        decisions = []
        for tokens, (refused, retry_ms) in zip(needs, verdicts, strict=True):
            decision = Decision(
                refused=refused.decode(),
                retry_after_s=None if retry_ms < 0 else retry_ms / 1000.0,
                slot=slot,
                remaining_requests=left_requests,
                reset_requests_s=reset_requests_ms / 1000.0,
                remaining_tokens=left_tokens,
                reset_tokens_s=reset_tokens_ms / 1000.0,
            )
            if not decision.refused:
                meter.held += 1
                meter.taken.add(slot, 1, tokens)
            decisions.append(decision)
        return decisions

    # ---- without it

    def _decide_alone(self, meter: _Meter, tokens: int) -> Decision:
        """Decide by this gateway's part of the limits, and by what it has taken itself."""
        decision = meter.taken.decide(self._part(meter.tenant), time.time(), tokens, meter.held)
        self._count("gateway_limits_alone", {"tenant": meter.tenant.name}, 1.0)
        if not decision.refused:
            meter.held += 1
            meter.owed.add(decision.slot, 1, tokens)
        meter.told = False
        meter.owed.prune(decision.slot)
        return decision

    def _part(self, tenant: Tenant) -> Tenant:
        def part(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // max(1, self.gateways))

        return Tenant(
            name=tenant.name,
            requests_per_minute=part(tenant.requests_per_minute),
            tokens_per_minute=part(tenant.tokens_per_minute),
            max_concurrent=part(tenant.max_concurrent),
        )

    @staticmethod
    def _owe(meter: _Meter, owed: Window) -> None:
        for slot, (requests, tokens) in owed.slots.items():
            meter.owed.add(slot, requests, tokens)
