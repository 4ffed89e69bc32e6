"""How other systems divide the SMs of a GPU among its engines: functions of one shape.

Each returns a share per engine that has work, in percent. They may add up to more than the whole: then the
engines slow one another down.
"""

from collections.abc import Callable, Sequence

from services.local_sched.grid import Profile
from shared.devices import Device

Shares = Callable[[Device, Sequence[Profile], int], tuple[int, ...]]
"""Of the device, what each engine has to do, and the place of the clock in its tables."""


def everything(device: Device, profiles: Sequence[Profile], clock: int) -> tuple[int, ...]:
    """Let every engine use all SMs: nobody partitions them."""
    return (device.sm_sizes_pct[-1],) * len(profiles)


SHARES: dict[str, Shares] = {"all": everything}
"""By the name that the setting `shares` gives them."""
