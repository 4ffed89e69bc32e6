"""The NVML of a machine with as many GPUs as a test likes: the stub of `nvml_stub/`, built with gcc.

`pynvml` finds it as it finds the driver's: this process by its name, which is loaded already, and a child by
`StubNvml.env`. All of them see the same GPUs, which a test changes here.
"""

import ctypes
import os
import shutil
import subprocess
from importlib.metadata import files
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parent / "nvml_stub" / "nvml_stub.c"
LIBRARY = "libnvidia-ml.so.1"
UUIDS = [f"GPU-00000000-0000-0000-0000-00000000000{i}" for i in range(4)]
HOST = -1
"""In place of a GPU's number: the machine."""


class Call(NamedTuple):
    """A call that would have changed a GPU: ``lock 1005-1005``, ``reset``, ``lock_memory 1593-1593``…

    `at_s` is monotonic time; `result` NVML's return code, 0 for success.
    """

    at_s: float
    pid: int
    gpu: int
    what: str
    result: int


class StubNvml:
    """GPUs made up for one test.

    Args:
        library: the stub, built.
        state: file that they live in.
        gpus: how many.
    """

    def __init__(self, library: Path, state: Path, gpus: int = 4) -> None:
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.stub_get.restype = ctypes.c_double
        self._state = os.fsencode(state)
        self._log = state.with_name(state.name + ".log")
        self.env = {"FESTINA_NVML_STUB": str(state), "LD_LIBRARY_PATH": str(library.parent)}
        assert self._library.stub_create(self._state, gpus), f"no stub in {state}"

    def set(self, gpu: int, **values: float | str) -> None:
        """Set fields of a GPU, or of the `HOST`: those in `nvml_stub.c`, or the texts name, uuid, driver."""
        for name, value in values.items():
            if isinstance(value, str):
                known = self._library.stub_set_text(self._state, gpu, name.encode(), value.encode())
            else:
                known = self._library.stub_set(self._state, gpu, name.encode(), ctypes.c_double(value))
            assert known, f"the stub has no {name}"

    def get(self, gpu: int, name: str) -> float:
        """Read a field of a GPU, or ``running_mhz`` (capped, throttled) or ``power_w``, of this moment."""
        value = float(self._library.stub_get(self._state, gpu, name.encode()))
        assert value == value, f"the stub has no {name}"
        return value

    def locked_mhz(self, gpu: int) -> tuple[int, int] | None:
        """Return the range that a GPU's clock is locked to; None if it is not."""
        low, high = self.get(gpu, "locked_min_mhz"), self.get(gpu, "locked_max_mhz")
        return (int(low), int(high)) if high else None

    @property
    def calls(self) -> list[Call]:
        """Calls that would have changed a GPU, from whatever process, in order."""
        found = []
        for line in self._log.read_text().splitlines():
            at_s, pid, gpu, *what, result = line.split()
            found.append(Call(float(at_s), int(pid), int(gpu), " ".join(what), int(result)))
        return found


def build(folder: Path) -> Path:
    """Compile the stub into a folder and return its path; skips the test where there is no gcc."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("the stub NVML is built with gcc, which is not here")
    header = next(file for file in files("nvidia-nvml-dev") or () if file.name == "nvml.h")
    library = folder / LIBRARY
    warnings = ["-Wall", "-Wextra", "-Werror"]
    flags = ["-shared", "-fPIC", "-O1", *warnings, f"-Wl,-soname,{LIBRARY}"]
    include = f"-I{Path(str(header.locate())).parent}"
    subprocess.run(
        [compiler, *flags, include, str(SOURCE), "-o", str(library), "-lm", "-lpthread"], check=True
    )
    return library
