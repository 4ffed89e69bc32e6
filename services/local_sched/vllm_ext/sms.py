"""The streams of an engine on parts of its GPU's SMs, and the change from one to another (3.4)."""

from typing import Any, Protocol

from services.local_sched.vllm_ext.wire import SmCut
from shared.errors import FestinaError


class SmDriver(Protocol):
    """What is needed of the CUDA driver and of torch (`cuda_sms.py`)."""

    @property
    def sm_count(self) -> int:
        """SMs that this process can use."""

    def split(self, group_sms: int) -> int:
        """Split the SMs into groups of so many, and return how many groups there are."""

    def stream(self, groups: range) -> Any:
        """Make a stream on these groups."""

    def ordinary(self) -> Any:
        """Return the stream that work runs on now, with all SMs."""

    def switch(self, stream: Any) -> None:
        """Let all work from now on run on a stream, after what is under way."""


class SmStreams:
    """Streams on every part of the SMs that a scheduler may give, made at once; `use` changes between them.

    Args:
        cut: the parts.
        driver: makes streams.

    Raises:
        FestinaError: this GPU cannot be cut so.
    """

    def __init__(self, cut: SmCut, driver: SmDriver) -> None:
        if driver.sm_count != cut.sm_count:
            raise FestinaError(
                f"this process has {driver.sm_count} SMs, and its scheduler counts {cut.sm_count}: set"
                " FESTINA_DEVICE_GPU_TYPE, and give no CUDA_MPS_ACTIVE_THREAD_PERCENTAGE to the MPS daemon"
            )
        groups, needed = driver.split(cut.group_sms), cut.units * cut.unit_groups
        if groups < needed:
            raise FestinaError(
                f"the driver makes {groups} groups of {cut.group_sms} SMs, and {needed} are needed: set"
                " FESTINA_DEVICE_SM_PARTITION to mps or none"
            )
        self._driver = driver
        self._streams = {(0, cut.units): driver.ordinary()}
        for first, units in cut.parts:
            of_part = range(first * cut.unit_groups, (first + units) * cut.unit_groups)
            self._streams[first, units] = driver.stream(of_part)
        self._now = (0, cut.units)

    def use(self, first: int, units: int) -> None:
        """Go on in another part of the SMs; call it between two steps."""
        if (first, units) != self._now:
            self._driver.switch(self._streams[first, units])
            self._now = (first, units)
