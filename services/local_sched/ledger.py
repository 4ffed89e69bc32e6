"""Memory of one GPU: device bytes, and KV blocks per engine (3.2.2, 3.4).

The ledger is the one place that says what fits. It counts promises, not use: a request holds what it is
expected to need until it ends, so an engine never has to pre-empt on its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.model import ModelSpec, StairStep


@dataclass(slots=True)
class Pool:
    """One engine's share of the memory: its weights, and the KV blocks promised to each holder.

    A fixed pool (`pool_bytes` > 0) takes its whole size from the device at once; an elastic one (0) takes
    what its holders hold. `held_blocks` is the sum of what they do. One that is `asleep` has its weights in
    host memory, and takes nothing but what is held.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    pool_bytes: int
    block_tokens: int
    holders: dict[str, int] = field(default_factory=dict)
    held_blocks: int = 0
    asleep: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return self.kv_bytes_per_token * self.block_tokens

    def bytes_for(self, tokens: int) -> int:
        """Return the KV bytes of this many tokens, in whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_bytes

    @property
    def held_bytes(self) -> int:
        """KV bytes promised to all holders."""
        return self.held_blocks * self.block_bytes

    @property
    def fixed_bytes(self) -> int:
        """What the engine takes from the device whatever is held: weights and fixed pool."""
        return 0 if self.asleep else self.weight_bytes + self.pool_bytes

    @property
    def device_bytes(self) -> int:
        """What the engine takes from the device."""
        return self.fixed_bytes + (0 if self.pool_bytes and not self.asleep else self.held_bytes)

    def hold(self, holder: str, blocks: int) -> None:
        """Let a holder have so many blocks; 0 takes it off the list."""
        self.held_blocks += blocks - self.holders.get(holder, 0)
        if blocks:
            self.holders[holder] = blocks
        else:
            self.holders.pop(holder, None)


class Ledger:
    """All promises on one device's `capacity_bytes`. A holder is a request id or a move id.

    Where models make room for one another (`switches`), each may have all of it at its time.
    """

    def __init__(self, capacity_bytes: int, switches: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.switches = switches
        self.pools: dict[str, Pool] = {}

    @property
    def free_bytes(self) -> int:
        """Device bytes promised to nobody."""
        return self.capacity_bytes - sum([pool.device_bytes for pool in self.pools.values()])

    def open(self, spec: ModelSpec, pool_bytes: int, block_tokens: int) -> bool:
        """Take memory for a model's weights and fixed pool; False, and nothing taken, if it does not fit.

        Where models make room for one another it has to fit alone, and is asleep at first.
        """
        pool = Pool(spec.weight_bytes, spec.kv_bytes_per_token, pool_bytes, block_tokens)
        if pool.device_bytes > (self.capacity_bytes if self.switches else self.free_bytes):
            return False
        pool.asleep = self.switches
        self.pools[spec.name] = pool
        return True

    def missing_bytes(self, model: str) -> int:
        """Return what is not free of what a model that is asleep takes when it wakes; at most 0: it fits."""
        pool = self.pools[model]
        return pool.weight_bytes + max(0, pool.pool_bytes - pool.held_bytes) - self.free_bytes

    def wake(self, model: str) -> None:
        """Take memory for the weights of a model that was asleep."""
        assert self.missing_bytes(model) <= 0, f"there is no room for {model}"
        self.pools[model].asleep = False

    def sleep(self, model: str) -> None:
        """Give back what a model takes beside what is held."""
        self.pools[model].asleep = True

    def resize(self, model: str, pool_bytes: int, block_tokens: int) -> None:
        """Adopt the pool that a started engine reports; what was promised stays so, in its blocks."""
        pool = self.pools[model]
        for holder, blocks in list(pool.holders.items()):
            pool.hold(holder, -(-blocks * pool.block_tokens // block_tokens))
        pool.pool_bytes, pool.block_tokens = pool_bytes, block_tokens

    def close(self, model: str) -> None:
        """Give back all that an engine took."""
        self.pools.pop(model, None)

    def free_kv_bytes(self, model: str) -> int:
        """KV bytes that this engine could still promise."""
        pool = self.pools.get(model)
        if pool is None:
            return 0
        free_bytes = pool.pool_bytes - pool.held_bytes if pool.pool_bytes else self.free_bytes
        return max(0, min(free_bytes, self.free_bytes) if pool.asleep else free_bytes)

    def most_kv_bytes(self, model: str) -> int:
        """KV bytes that this engine could promise if no request held any."""
        pool = self.pools[model]
        if pool.pool_bytes:
            return pool.pool_bytes
        if self.switches:
            return self.capacity_bytes - pool.weight_bytes
        others = sum(p.fixed_bytes for p in self.pools.values())
        return self.capacity_bytes - others

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """KV bytes of all engines that could still be promised, and those if no request held any."""
        fixed = free_fixed = taken = held = 0
        elastic = False
        for pool in self.pools.values():
            taken += pool.fixed_bytes
            if pool.asleep:
                held += pool.held_bytes
            elif pool.pool_bytes:
                fixed += pool.pool_bytes
                free_fixed += max(0, pool.pool_bytes - pool.held_bytes)
            else:
                elastic = True
                held += pool.held_bytes
        shared = self.capacity_bytes - taken if elastic else 0
        return free_fixed + max(0, shared - held), fixed + shared

    def most_tokens(self, model: str) -> int:
        """Tokens whose KV the engine could promise to one request if no other held any."""
        pool = self.pools[model]
        return self.most_kv_bytes(model) // pool.block_bytes * pool.block_tokens

    def held_tokens(self, model: str, holder: str) -> int:
        """Tokens whose KV is promised to a holder; 0 if it holds nothing."""
        pool = self.pools.get(model)
        return pool.holders.get(holder, 0) * pool.block_tokens if pool else 0

    def reserve(self, model: str, holder: str, tokens: int) -> bool:
        """Promise a holder KV for `tokens` in all, or raise what it has to that; False if it does not fit."""
        pool = self.pools[model]
        held = pool.holders.get(holder, 0)
        blocks = -(-tokens // pool.block_tokens)
        if (blocks - held) * pool.block_bytes > self.free_kv_bytes(model):
            return False
        pool.hold(holder, max(held, blocks))
        return True

    def release(self, model: str, holder: str) -> None:
        """Take back all that a holder was promised; nothing happens if that is nothing."""
        if pool := self.pools.get(model):
            pool.hold(holder, 0)

    def rename(self, model: str, holder: str, new_holder: str) -> None:
        """Hand a holder's promise to another, as when a moved request arrives."""
        pool = self.pools[model]
        blocks = max(pool.holders[holder], pool.holders.get(new_holder, 0))
        pool.hold(holder, 0)
        pool.hold(new_holder, blocks)

    def domains(self) -> list[list[str]]:
        """Return the groups of models that compete for the same memory."""
        fixed = [[name] for name, pool in self.pools.items() if pool.pool_bytes]
        elastic = [name for name, pool in self.pools.items() if not pool.pool_bytes]
        return [*fixed, elastic] if elastic else fixed

    def domain(self, model: str) -> list[str]:
        """Models whose requests compete with this one's for memory: all elastic ones, or itself alone."""
        return next(domain for domain in self.domains() if model in domain)


def staircase(
    free_bytes: int,
    free_sm_share_pct: int,
    ends: Sequence[tuple[float, int, int]],
    claimed_bytes: int = 0,
    most_steps: int = 8,
) -> tuple[StairStep, ...]:
    """Return what is expected to be free from when on (3.3, T_avail), in at most `most_steps` steps.

    Args:
        free_bytes: memory free now.
        free_sm_share_pct: SM share free now.
        ends: (ms from now, bytes, SM share) that each running request is expected to free.
        claimed_bytes: what waiting requests will take first.
        most_steps: neighbouring steps are joined, to the later of their times, until so few are left.
    """
    steps = [StairStep(0.0, max(0, free_bytes - claimed_bytes), free_sm_share_pct)]
    ordered = sorted(ends)
    groups = min(len(ordered), most_steps - 1)
    start = 0
    for group in range(1, groups + 1):
        stop = round(len(ordered) * group / groups)
        after_ms = 0.0
        for after_ms, freed_bytes, freed_pct in ordered[start:stop]:  # noqa: B007 (the last of them counts)
            free_bytes += freed_bytes
            free_sm_share_pct += freed_pct
        free_sm_share_pct = min(100, free_sm_share_pct)
        steps.append(StairStep(after_ms, max(0, free_bytes - claimed_bytes), free_sm_share_pct))
        start = stop
    return tuple(steps)
