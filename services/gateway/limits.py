"""What each tenant may use: the table of limits, and how one minute is counted.

A minute is 60 s back from now, whenever that is, counted in slots of one second of the store's clock. A slot
counts until 61 s after it began, so no 60 s ever see more than the limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.errors import InvalidRequest
from shared.model import Struct, Tenant, slug

SLOTS = 61
REQUESTS, TOKENS, CONCURRENT = "requests", "tokens", "concurrent"
NAMES = {REQUESTS: "requests per minute", TOKENS: "tokens per minute", CONCURRENT: "concurrent requests"}


class Tenants:
    """Limits by tenant, from the file (fixed) and from the store (replaced as it changes)."""

    def __init__(self, from_file: Mapping[str, Tenant] | None = None) -> None:
        self.from_file = dict(from_file or {})
        self._known = dict(self.from_file)

    def set_stored(self, tenants: list[Tenant]) -> None:
        """Take what the store holds now; a tenant of the file keeps the file's limits."""
        self._known = {**{tenant.name: tenant for tenant in tenants}, **self.from_file}

    def put(self, tenant: Tenant) -> None:
        """Take one tenant's new limits at once."""
        self._known[tenant.name] = tenant

    def get(self, name: str) -> Tenant:
        """Return a tenant's limits; one that nobody has spoken of has none, and weight 1."""
        return self._known.get(name) or Tenant(name=name)

    def all(self) -> list[Tenant]:
        """Return the tenants that have limits or a weight, by name."""
        return [self._known[name] for name in sorted(self._known)]

    def conflict(self, tenant: Tenant) -> str:
        """Say why these limits cannot be set; empty if they can."""
        if tenant.name in self.from_file:
            return f"the limits of {tenant.name!r} stand in the file of API keys; change them there"
        alike = [name for name in self._known if slug(name) == slug(tenant.name) and name != tenant.name]
        return f"the name {tenant.name!r} is too like {alike[0]!r}" if alike else ""


def is_limited(tenant: Tenant) -> bool:
    """Say whether anything has to be counted for a tenant."""
    limits = (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_concurrent)
    return any(limit is not None for limit in limits)


def fault(tenant: Tenant) -> tuple[str, str] | None:
    """Return (field, what is wrong with it) of a tenant that makes no sense; None if it does."""
    if not slug(tenant.name) or tenant.name != tenant.name.strip():
        return "name", "a tenant's name needs a letter or digit, and no space around it"
    for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
        limit = getattr(tenant, name)
        if limit is not None and limit < 1:
            return name, f"{name} must be at least 1, not {limit}; leave it out for no limit"
    if not 0.0 < tenant.weight <= 1000.0:
        return "weight", f"weight must be above 0 and at most 1000, not {tenant.weight}"
    return None


class Decision(Struct):
    """Whether a call may go on, and how its tenant stands after it.

    Args:
        refused: empty, or the limit that was reached.
        retry_after_s: when trying again makes sense; None where waiting alone does not help.
        slot: second in which it is counted.
        remaining_requests, reset_requests_s: left of the minute, and when all of it is free again; -1 where
            there is no limit; likewise for tokens.
    """

    refused: str = ""
    retry_after_s: float | None = None
    slot: int = 0
    remaining_requests: int = -1
    reset_requests_s: float = 0.0
    remaining_tokens: int = -1
    reset_tokens_s: float = 0.0


def headers_of(tenant: Tenant, decision: Decision) -> dict[str, str]:
    """Return the headers, named as OpenAI's, that tell a client how it stands."""
    headers = {}
    stands = (
        (REQUESTS, tenant.requests_per_minute, decision.remaining_requests, decision.reset_requests_s),
        (TOKENS, tenant.tokens_per_minute, decision.remaining_tokens, decision.reset_tokens_s),
    )
    for name, limit, remaining, reset_s in stands:
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, remaining))
            headers[f"x-ratelimit-reset-{name}"] = f"{reset_s:.3f}s"
    return headers


def refusal(tenant: Tenant, decision: Decision, tokens: int) -> InvalidRequest:
    """Return the 429 for a call that reached a limit."""
    limits = {
        REQUESTS: tenant.requests_per_minute,
        TOKENS: tenant.tokens_per_minute,
        CONCURRENT: tenant.max_concurrent,
    }
    limit = limits[decision.refused]
    if decision.retry_after_s is None:
        text = f"the call asks for {tokens}; ask for fewer with max_tokens"
    else:
        text = f"try again in {decision.retry_after_s:.1f} s"
    message = f"tenant {tenant.name!r} has reached its limit of {limit} {NAMES[decision.refused]}: {text}"
    headers = headers_of(tenant, decision)
    return InvalidRequest(
        429, "rate_limit_exceeded", message, retry_after_s=decision.retry_after_s, headers=headers
    )


@dataclass
class Window:
    """What was taken in each second of the last minute: (requests, tokens) by slot."""

    slots: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, slot: int, requests: int, tokens: int) -> None:
        """Count something in a slot; negative amounts are given back."""
        had = self.slots.get(slot, (0, 0))
        self.slots[slot] = (had[0] + requests, had[1] + tokens)

    def prune(self, now_slot: int) -> None:
        """Forget what is over a minute old."""
        self.slots = {slot: taken for slot, taken in self.slots.items() if slot > now_slot - SLOTS}

    def decide(self, tenant: Tenant, now_s: float, tokens: int, held: int) -> Decision:
        """Decide on a call of so many tokens by these counts alone, and count it if it may go on."""
        now_slot = int(now_s)
        self.prune(now_slot)
        most = (tenant.requests_per_minute, tenant.tokens_per_minute)
        if tenant.max_concurrent is not None and held >= tenant.max_concurrent:
            return self._decision(tenant, now_s, CONCURRENT, 1.0)
        for which, name, need in ((0, REQUESTS, 1), (1, TOKENS, tokens)):
            limit = most[which]
            excess = 0 if limit is None else self._used(which) + need - limit
            if excess > 0:
                return self._decision(tenant, now_s, name, self._freed_s(which, excess, now_s))
        self.add(now_slot, 1, tokens)
        return self._decision(tenant, now_s, "", None)

    def _used(self, which: int) -> int:
        return sum(taken[which] for taken in self.slots.values())

    def _freed_s(self, which: int, amount: int, now_s: float) -> float | None:
        """Return in how many seconds so much more will be free; None if there is less than that to free."""
        for slot in sorted(self.slots):
            amount -= self.slots[slot][which]
            if amount <= 0:
                return slot + SLOTS - now_s
        return None

    def _decision(self, tenant: Tenant, now_s: float, refused: str, retry_after_s: float | None) -> Decision:
        reset_s = max((slot + SLOTS - now_s for slot, taken in self.slots.items() if any(taken)), default=0.0)
        limit_requests, limit_tokens = tenant.requests_per_minute, tenant.tokens_per_minute
        return Decision(
            refused=refused,
            retry_after_s=retry_after_s,
            slot=int(now_s),
            remaining_requests=-1 if limit_requests is None else limit_requests - self._used(0),
            reset_requests_s=reset_s,
            remaining_tokens=-1 if limit_tokens is None else limit_tokens - self._used(1),
            reset_tokens_s=reset_s,
        )
