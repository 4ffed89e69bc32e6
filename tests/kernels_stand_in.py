"""Stands in for the interpreter of a CUDA environment: its versions, and the kernels' process of `gpu_check`.

Kernels are sleeps that load GPU 0 of the stub NVML by the part of its SMs. What they tell is made up: a
decode runs at the square root of that part, a prefill in proportion, and beside another process at half.
"""

import ctypes
import json
import os
import stat
import sys
import time
from pathlib import Path

GROUPS, GROUP_SMS, ALL_SMS = 16, 8, 132
MS = {"decode": 4.0, "prefill": 8.0}
N_BYTES, FLOP = 8_000_000, 4_000_000_000
VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0", "torch_cuda": "13.0", "cuda_bindings": "13.0.3"}


def interpreter(folder: Path, **versions: str) -> str:
    """Write the interpreter into a folder, and return its path."""
    path = folder / "python"
    found = json.dumps(VERSIONS | versions)
    path.write_text(
        f"#!/bin/sh\ncase $1 in\n-I) echo '{found}';;\n*) exec {sys.executable} {__file__} {folder};;\nesac\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class Device:
    """The stub's GPU 0, and who else computes on it, told by files."""

    def __init__(self, folder: Path) -> None:
        self._stub = ctypes.CDLL("libnvidia-ml.so.1")
        self._mine = folder / f"busy-{os.getpid()}"
        self._folder = folder

    def load(self, load: float) -> None:
        state = os.environ["FESTINA_NVML_STUB"].encode()
        assert self._stub.stub_set(state, 0, b"load", ctypes.c_double(load))
        if load:
            self._mine.touch()
        else:
            self._mine.unlink()

    @property
    def shared(self) -> bool:
        return len(list(self._folder.glob("busy-*"))) > 1


def run(device: Device, kernel: str, for_s: float, first: int = 0, groups: int = 0) -> dict:
    assert first >= 0 and first + groups <= GROUPS
    part = groups * GROUP_SMS / ALL_SMS if groups else 1.0
    device.load(part)
    print(json.dumps({"begun": True}), flush=True)
    ended_s, shared = time.monotonic() + for_s, False
    while time.monotonic() < ended_s:
        time.sleep(0.005)
        shared = shared or device.shared
    device.load(0.0)
    speed = (part**0.5 if kernel == "decode" else part) / (2 if shared else 1)
    return {"runs": 1000, "ran_s": MS[kernel] / speed, "n_bytes": N_BYTES, "flop": FLOP}


def obey(device: Device, order: dict) -> dict:
    match order.pop("do"):
        case "device":
            return {"name": "stand-in", "sms": ALL_SMS, "start_ms": 12.0}
        case "split":
            return {"groups": ALL_SMS // order["group_sms"], "sms": ALL_SMS}
        case "run":
            return run(device, **order)
        case "copy":
            print(json.dumps({"begun": True}), flush=True)
            rate = 50e9 if order["to"] == "host" else 25e9
            return {"runs": 10, "ran_s": 10 * order["n_bytes"] / rate, "n_bytes": order["n_bytes"]}
    return {"error": "ValueError: no such order"}


if __name__ == "__main__":
    here = Device(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(obey(here, json.loads(line))), flush=True)
