"""How other systems choose the clock of a GPU: functions of one shape."""

from collections.abc import Callable, Sequence

from services.local_sched.grid import Profile
from shared.devices import Device

Clock = Callable[[Device, Sequence[Profile], tuple[int, ...]], int]
"""Of the device, what each engine has to do, and the clocks, descending; returns the place of one of them."""


def default(device: Device, profiles: Sequence[Profile], clocks_mhz: tuple[int, ...]) -> int:
    """Leave the clock as it is when nobody governs it."""
    return clocks_mhz.index(device.default_clock_mhz)


CLOCKS: dict[str, Clock] = {"default": default}
"""By the name that the setting `clock` gives them."""
