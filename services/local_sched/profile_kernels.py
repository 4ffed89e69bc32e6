"""Kernel profile without an engine: matrix products and attention of a model's shapes, per number of SMs.

For a GPU with torch but without vLLM: ``python profile_kernels.py --shape Qwen2.5-7B --out kernels.json``. It
stands alone (torch, and nvidia-ml-py for watts) and changes no clock. Each kernel runs under a green context
of each size, which torch has from 2.10 on, as a beta. Power against SM share is what this is for: nobody has
published it.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

SHAPES = {
    # hidden, intermediate, heads, kv heads, head dimension
    "Qwen2.5-7B": (3584, 18944, 28, 4, 128),
    "Llama-2-13B": (5120, 13824, 40, 40, 128),
}
SM_COUNTS = (16, 32, 64, 96, 128)
PREFILL_TOKENS = (256, 1024, 4096)
DECODE_BATCHES = (1, 16, 64)
DECODE_CONTEXT = 1024
POWER_WINDOW_S = 1.2
"""The energy counter moves in steps of up to 100 ms: watts come from windows of over a second."""


class NoDevice(RuntimeError):
    """There is nothing here to profile; the message says what is missing."""


def cuda() -> Any:
    """Return torch, ready for CUDA with green contexts.

    Raises:
        NoDevice: torch, a CUDA device, or green contexts are missing.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise NoDevice(
            "no torch in this Python: run it in an environment that has a CUDA build of it"
        ) from None
    if not torch.cuda.is_available():
        raise NoDevice("no CUDA device here (or a build of torch without CUDA): kernels need a real GPU")
    if not getattr(importlib.import_module("torch.cuda.green_contexts"), "SUPPORTED", False):
        raise NoDevice(f"torch {torch.__version__} has no green contexts; 2.10 or later has")
    return torch


def work_of(torch: Any, shape: tuple[int, int, int, int, int]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, one run) of every kernel of a layer: products by tokens in a step, attention by phase."""
    hidden, intermediate, heads, kv_heads, head_dim = shape
    new = {"device": "cuda", "dtype": torch.bfloat16}
    attention = torch.nn.functional.scaled_dot_product_attention
    products = {
        "qkv": (hidden, (heads + 2 * kv_heads) * head_dim),
        "out": (heads * head_dim, hidden),
        "gate_up": (hidden, 2 * intermediate),
        "down": (intermediate, hidden),
    }
    for name, (rows, columns) in products.items():
        weight = torch.randn(rows, columns, **new)
        for tokens in (*DECODE_BATCHES, *PREFILL_TOKENS):
            given = torch.randn(tokens, rows, **new)
            yield f"{name}.{tokens}", partial(torch.matmul, given, weight)
    for tokens in PREFILL_TOKENS:
        query = torch.randn(1, heads, tokens, head_dim, **new)
        keys = torch.randn(1, kv_heads, tokens, head_dim, **new)
        run = partial(attention, query, keys, keys, is_causal=True, enable_gqa=True)
        yield f"prefill_attention.{tokens}", run
    for batch in DECODE_BATCHES:
        query = torch.randn(batch, heads, 1, head_dim, **new)
        keys = torch.randn(batch, kv_heads, DECODE_CONTEXT, head_dim, **new)
        yield f"decode_attention.{batch}", partial(attention, query, keys, keys, enable_gqa=True)


def timed(torch: Any, run: Callable[[], Any], energy_mj: Callable[[], int] | None) -> dict[str, float | None]:
    """Return ms of one run, the median of several groups, and W over a window of runs back to back."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    rough_s = (time.perf_counter() - started) / 10
    group = max(1, int(0.02 / rough_s))
    spans = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(group):
            run()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) / group)
    watts = None
    if energy_mj is not None:
        before, started = energy_mj(), time.perf_counter()
        while time.perf_counter() - started < POWER_WINDOW_S:
            for _ in range(group):
                run()
            torch.cuda.synchronize()
        watts = (energy_mj() - before) / 1000 / (time.perf_counter() - started)
    return {"ms": sorted(spans)[3], "spread_ms": max(spans) - min(spans), "power_w": watts}


def energy_counter(index: int) -> Callable[[], int] | None:
    """Return a reader of the device's energy counter in mJ; None without nvidia-ml-py."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))


def profile(shape_name: str, index: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return kernel times and watts of a shape on each number of SMs, with where they come from.

    Raises:
        NoDevice: there is no device for it here.
    """
    torch = cuda()
    torch.cuda.set_device(index)
    green = importlib.import_module("torch.cuda.green_contexts").GreenContext
    whole = torch.cuda.get_device_properties(index).multi_processor_count
    energy_mj = energy_counter(index)
    rows = []
    for sms in (*(n for n in SM_COUNTS if n < whole), whole):
        context = green.create(num_sms=sms, device_id=index) if sms < whole else None
        if context is not None:
            context.set_context()
        try:
            for name, run in work_of(torch, SHAPES[shape_name]):
                rows.append({"kernel": name, "sms": sms, **timed(torch, run, energy_mj)})
        finally:
            if context is not None:
                context.pop_context()
        say(f"{sms} of {whole} SMs: {len(rows)} kernels timed")
    return {
        "shape": shape_name,
        "device": torch.cuda.get_device_name(index),
        "sms": whole,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "clocks": "as the driver governs them",
        "power": "energy counter" if energy_mj is not None else "not measured: no nvidia-ml-py",
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }


def main() -> None:
    """Profile a shape and write the result as JSON; one line and status 3 where there is no device."""
    parser = argparse.ArgumentParser(prog="profile_kernels", description=main.__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--device", type=int, default=0, help="number of the CUDA device")
    parser.add_argument("--out", required=True, help="file to write")
    args = parser.parse_args()
    try:
        found = profile(args.shape, args.device, lambda line: print(line, flush=True))
    except NoDevice as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    with open(args.out, "w") as file:
        json.dump(found, file, indent=1)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
