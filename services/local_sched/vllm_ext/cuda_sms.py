"""Green contexts of the CUDA driver, and torch's streams on them.

Not run yet for want of a GPU: `SmStreams`, which says what is to be made and when to change, is tested with a
recorder in the driver's place. torch's own green contexts are by a number of SMs only; which SMs these are it
does not say, and those of two processes would be the same.
"""

from typing import Any

import torch
from cuda.bindings import driver

from shared.errors import FestinaError


class CudaSms:
    """The SMs of the GPU that this process uses; it has a context there already."""

    def __init__(self) -> None:
        (self._device,) = _done(driver.cuDeviceGet(torch.cuda.current_device()), "cuDeviceGet")
        sms = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        asked = driver.cuDeviceGetDevResource(self._device, sms)
        (self._all,) = _done(asked, "cuDeviceGetDevResource")
        self._groups: list[Any] = []
        self._contexts: list[Any] = []  # a stream lives no longer than its context

    @property
    def sm_count(self) -> int:
        """SMs that this process can use."""
        return int(self._all.sm.smCount)

    def split(self, group_sms: int) -> int:
        """Split the SMs into groups of so many, and return how many groups there are."""
        most = self.sm_count // group_sms
        split = driver.cuDevSmResourceSplitByCount(most, self._all, 0, group_sms)
        groups, count, _ = _done(split, "cuDevSmResourceSplitByCount")
        self._groups = list(groups[:count])
        return len(self._groups)

    def stream(self, groups: range) -> Any:
        """Make a green context of these groups, which are of one split, and a stream in it."""
        chosen = [self._groups[group] for group in groups]
        (described,) = _done(
            driver.cuDevResourceGenerateDesc(chosen, len(chosen)), "cuDevResourceGenerateDesc"
        )
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        (context,) = _done(driver.cuGreenCtxCreate(described, self._device, flags), "cuGreenCtxCreate")
        self._contexts.append(context)
        non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        (stream,) = _done(driver.cuGreenCtxStreamCreate(context, non_blocking, 0), "cuGreenCtxStreamCreate")
        return torch.cuda.ExternalStream(int(stream))

    def ordinary(self) -> Any:
        """Return the stream that work runs on now."""
        return torch.cuda.current_stream()

    def switch(self, stream: Any) -> None:
        """Let all work from now on run on a stream, after what is under way."""
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)  # vLLM has put its own in place of this, and remembers the stream


def _done(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Return what a call of the driver returned; raises FestinaError where it failed."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise FestinaError(
            f"{what} failed with {status.name}: this driver makes no green contexts here; set"
            " FESTINA_DEVICE_SM_PARTITION to mps or none"
        )
    return tuple(values)
