"""How the vLLM engines of a real GPU share its SMs: by which means, in which sizes, and who gets which (3.4).

The share of a process under MPS is fixed when its context is made, so A.3 of the paper is not to be had that
way. By green contexts it is: each engine has, from its start, streams on parts of the SMs, and goes on in
another one between two steps (`vllm_ext/sms.py`). Processes compute beside each other only as clients of one
MPS daemon; without it they take turns, and one on a part of the SMs would leave the rest idle in its turn.
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

from services.local_sched.host_facts import HostFacts, no_green_contexts, no_mps
from shared.devices import Device
from shared.errors import ConfigError

Means = Literal["green", "mps", "none"]

UNITS = 8
"""A device is cut into about so many equal units; an engine gets 1, 2, 4 or 6 of them, or the whole."""
SIZES = (1, 2, 4, 6)


class Part(NamedTuple):
    """A part of the SMs: so many units, from the unit `first` on."""

    first: int
    units: int


class Cut(NamedTuple):
    """How a device is cut.

    Args:
        sm_count: its SMs.
        group_sms, unit_groups: SMs that the driver keeps together, and how many such groups are a unit.
        units: how many there are; SMs that are left over only the whole device has.
    """

    sm_count: int
    group_sms: int
    unit_groups: int
    units: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in units, ascending; the last is the whole device."""
        return (*(size for size in SIZES if size < self.units), self.units)

    @property
    def sizes_pct(self) -> tuple[int, ...]:
        """The sizes as shares of the device, so rounded that no more fit into 100 % than there are."""
        unit_pct = 100 // self.units
        return (*(size * unit_pct for size in self.sizes[:-1]), 100)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every part that `layout` may give, less the whole."""
        sizes = self.sizes[:-1]
        return tuple(Part(at, size) for size in sizes for at in range(0, self.units - size + 1, size))

    def size_of(self, share_pct: int) -> int:
        """Return the largest size that is no more than a share, in units; the smallest where none is."""
        fitting = [size for size, pct in zip(self.sizes, self.sizes_pct, strict=True) if pct <= share_pct]
        return fitting[-1] if fitting else self.sizes[0]


def cut_of(device: Device) -> Cut:
    """Return how a GPU is cut: into about eight units, none smaller than its share in whole percent says."""
    groups = device.sm_count // device.sm_group
    cuts = [Cut(device.sm_count, device.sm_group, each, groups // each) for each in range(1, groups // 2 + 1)]
    honest = [cut for cut in cuts if 100 * cut.group_sms * cut.unit_groups >= 100 // cut.units * cut.sm_count]
    return min(honest, key=lambda cut: (abs(cut.units - UNITS), -cut.units))


def layout(cut: Cut, shares_pct: dict[str, int]) -> dict[str, Part]:
    """Return the part of each engine that computes, by its share.

    The largest come first, side by side: each size divides the larger ones, so every part lies where a stream
    was made for it. Shares of up to 100 % in all do not overlap. More there are only where even the smallest
    sizes are more, or until the plans of a new decision have all arrived; what does not fit begins anew.
    """
    found: dict[str, Part] = {}
    at = 0
    for name, share_pct in sorted(shares_pct.items(), key=lambda each: -each[1]):
        size = cut.size_of(share_pct)
        if at + size > cut.units:
            at = 0
        found[name] = Part(at, size)
        at += size
    return found


class SmFacts(NamedTuple):
    """Why engines here are no clients of an MPS daemon, why they have no green contexts; empty: not so."""

    no_mps: str
    no_green: str


def sm_facts(host: HostFacts) -> SmFacts:
    """Return what a host's facts say of it."""
    return SmFacts(no_mps(host), no_green_contexts(host))


class Partition(NamedTuple):
    """How the engines of one GPU share its SMs.

    Args:
        means: by ``green`` contexts, by ``mps``, each with a share for life, or not at all (``none``).
        why: for the log.
        device: the GPU, with the shares that can be given this way.
        cut: how green contexts cut it; None by other means.
        shared_fate: a fatal fault of one engine takes all others with it.
    """

    means: Means
    why: str
    device: Device
    cut: Cut | None = None
    shared_fate: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """What an engine's process is told: the most SMs it has by MPS, and to keep to one stream."""
        if not self.shared_fate:
            return {}
        share_pct = self.device.sm_sizes_pct[0] if self.means == "mps" else 100
        told = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share_pct)}
        return told | ({"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"} if self.means == "green" else {})


def partition_for(asked: str, mps_share_pct: int, device: Device, facts: SmFacts) -> Partition:
    """Return how vLLM engines share the SMs of a device.

    Args:
        asked: ``green``, ``mps``, ``none``, or ``auto``: the first of these that works here.
        mps_share_pct: the share that each engine has for its life by ``mps``.

    Raises:
        ConfigError: what is asked does not work here; the message says why and what to do.
    """
    if not device.sm_count:
        if asked not in ("auto", "none"):
            raise ConfigError(f"FESTINA_DEVICE_SM_PARTITION={asked}: {device.name} has no SMs; leave it auto")
        return Partition("none", f"{device.name} has no SMs to share", device)
    missing = {"green": facts.no_mps or facts.no_green, "mps": facts.no_mps, "none": ""}
    if asked != "auto" and missing[asked]:
        raise ConfigError(
            f"FESTINA_DEVICE_SM_PARTITION={asked} does not work here: {missing[asked]};"
            " `festina doctor` says more"
        )
    if not 1 <= mps_share_pct <= 100:
        raise ConfigError(f"FESTINA_DEVICE_MPS_SHARE_PCT={mps_share_pct} is no share; give 1 to 100")
    means = asked if asked != "auto" else next(each for each, why in missing.items() if not why)
    if means == "green":
        cut = cut_of(device)
        sms = [size * cut.unit_groups * cut.group_sms for size in cut.sizes[:-1]]
        why = f"green contexts of {', '.join(map(str, sms))} or all {cut.sm_count} SMs, under MPS"
        return Partition("green", why, device.with_sm_sizes(cut.sizes_pct), cut, shared_fate=True)
    if means == "mps":
        why = f"each engine has {mps_share_pct} % of the SMs for its life: {missing['green'] or 'as set'}"
        return Partition("mps", why, device.with_sm_sizes((mps_share_pct,)), shared_fate=True)
    why = f"engines take turns on all SMs: {missing['mps'] or 'as set'}"
    return Partition("none", why, device.with_sm_sizes((100,)), shared_fate=not facts.no_mps)


class Parts:
    """Which part each engine of a GPU has; remembers what engines were told."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._shares_pct: dict[str, int] = {}
        self._told: dict[str, Part] = {}

    def plan(self, model: str, share_pct: int) -> None:
        """Take the share of an engine's plan."""
        self._shares_pct[model] = share_pct

    def forget(self, model: str) -> None:
        """An engine is gone, or asleep."""
        self._shares_pct.pop(model, None)
        self._told.pop(model, None)

    def moved(self, computing: Collection[str]) -> dict[str, Part]:
        """Return the parts of those engines that are to go on in another one; what does not compute stays."""
        shares_pct = {name: share for name, share in self._shares_pct.items() if name in computing}
        parts = layout(self._cut, shares_pct)
        news = {name: part for name, part in parts.items() if self._told.get(name) != part}
        self._told |= news
        return news
