"""Kernels on a real card for `make gpu-check`, in the engine's environment: an order is a line of JSON.

``python -m services.local_sched.gpu_kernels`` holds a context on the first CUDA device until its input ends.
Watts are read outside, by who gives the orders: ``begun`` says that a kernel is warm and runs from now on.
The parts of the SMs are those of the product's own green contexts (`vllm_ext/cuda_sms.py`). One line and
status 3 where there is no CUDA device.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

HIDDEN, INTERMEDIATE = 3584, 18944
"""Qwen2.5-7B's: the product of its largest matrix reads 272 MB, past every cache."""
DECODE_TOKENS, PREFILL_TOKENS = 16, 4096
GROUP_S = 0.02
"""Runs are started in groups of about so long, so that starting them costs nothing."""


class NoDevice(RuntimeError):
    """There is no CUDA device here; the message says what is missing."""


class Kernels:
    """Work on one device.

    Args:
        torch: the module.
        device: ``cuda:N``, or ``cpu`` to try the code itself.
        hidden, intermediate: shape of the product's matrix.
    """

    def __init__(
        self, torch: Any, device: str, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE
    ) -> None:
        self._torch, self._device = torch, device
        self._cuda = device != "cpu"
        started_s = time.perf_counter()
        if self._cuda:
            torch.cuda.set_device(device)
        new = {"device": device, "dtype": torch.bfloat16}
        self._given = torch.randn(PREFILL_TOKENS, hidden, **new)
        self._weight = torch.randn(hidden, 2 * intermediate, **new)
        self._sync()
        self._start_ms = (time.perf_counter() - started_s) * 1000.0
        self._sms: Any = None
        self._streams: dict[tuple[int, int], Any] = {}

    def device(self) -> dict[str, Any]:
        """Say what it is, and how long it took to make the context and the matrices."""
        torch = self._torch
        found = torch.cuda.get_device_properties(self._device) if self._cuda else None
        return {
            "name": found.name if found else "cpu",
            "sms": found.multi_processor_count if found else 0,
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "start_ms": self._start_ms,
        }

    def split(self, group_sms: int) -> dict[str, Any]:
        """Split the SMs into groups; says how many there are."""
        cuda_sms = importlib.import_module("services.local_sched.vllm_ext.cuda_sms")
        self._sms, self._streams = cuda_sms.CudaSms(), {}
        return {"groups": self._sms.split(group_sms), "sms": self._sms.sm_count}

    def run(self, kernel: str, for_s: float, first: int = 0, groups: int = 0) -> dict[str, Any]:
        """Run a kernel over and over on a part of the SMs; no groups: on all of them.

        ``decode`` multiplies few tokens, so that it reads weights, and ``prefill`` many.
        """
        tokens = DECODE_TOKENS if kernel == "decode" else PREFILL_TOKENS
        given, weight, torch = self._given[:tokens], self._weight, self._torch
        work = lambda: torch.matmul(given, weight)  # noqa: E731
        found = {"n_bytes": 2 * weight.numel(), "flop": 2 * tokens * weight.numel()}
        if not groups:
            return found | self._timed(work, for_s)
        if (first, groups) not in self._streams:
            self._streams[first, groups] = self._sms.stream(range(first, first + groups))
        with torch.cuda.stream(self._streams[first, groups]):
            return found | self._timed(work, for_s)

    def copy(self, to: str, n_bytes: int, for_s: float) -> dict[str, Any]:
        """Copy memory to the ``host`` or to the ``device`` over and over, the host's being pinned."""
        torch = self._torch
        there = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
        here = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=self._cuda)
        source, target = (there, here) if to == "host" else (here, there)
        return {"n_bytes": n_bytes} | self._timed(lambda: target.copy_(source, non_blocking=True), for_s)

    def _timed(self, work: Callable[[], Any], for_s: float) -> dict[str, Any]:
        for _ in range(3):
            work()
        self._sync()
        started_s = time.perf_counter()
        work()
        self._sync()
        group = max(1, int(GROUP_S / max(1e-6, time.perf_counter() - started_s)))
        tell({"begun": True})
        runs, started_s = 0, time.perf_counter()
        while time.perf_counter() - started_s < for_s:
            for _ in range(group):
                work()
            self._sync()
            runs += group
        return {"runs": runs, "ran_s": time.perf_counter() - started_s}

    def _sync(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()


def cuda() -> Any:
    """Return torch, ready for CUDA. Raises NoDevice."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise NoDevice("not a CUDA device: there is no torch in the engine's environment") from None
    if not torch.cuda.is_available():
        raise NoDevice(f"not a CUDA device: torch {torch.__version__} finds none")
    return torch


def tell(line: dict[str, Any]) -> None:
    """Answer with a line."""
    print(json.dumps(line), flush=True)


def obey(kernels: Kernels, line: str) -> None:
    """Carry out one order; what goes wrong with it is its answer."""
    order = json.loads(line)
    does: dict[str, Callable[..., dict[str, Any]]] = {
        "device": kernels.device,
        "split": kernels.split,
        "run": kernels.run,
        "copy": kernels.copy,
    }
    try:
        tell(does[order.pop("do")](**order))
    except Exception as error:  # of torch or the driver: the next order may do
        tell({"error": f"{type(error).__name__}: {error}"[:500]})


def main() -> None:
    """Obey until the input ends."""
    try:
        kernels = Kernels(cuda(), "cuda:0")
    except NoDevice as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    for line in sys.stdin:
        obey(kernels, line)


if __name__ == "__main__":
    main()
