"""``python -m services.cli.gpu_check``: the steps, then their results in ``build/gpu-check-NAME.json``."""

import argparse
import sys
from pathlib import Path

import msgspec

from services.cli.gpu_check.lab import Lab
from services.cli.gpu_check.run import Report, run
from services.cli.gpu_check.summary import summary
from services.local_sched.host_probe import probe
from services.local_sched.main import DeviceSettings
from services.local_sched.nvml import NvmlGpu
from shared.config import load
from shared.devices import device_for, type_of
from shared.errors import FestinaError
from shared.model import slug


def main() -> None:
    """Check a card. Status 1: there is none, a step has failed, or the preflight found what has."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the results")
    parser.add_argument("--allow-clocks", action="store_true", help="change clocks, and give them back")
    parser.add_argument("--gpu-type", default="", help="device type, if the card's name does not tell")
    parser.add_argument("--pace", type=float, default=1.0, help="every span of time is so many times as long")
    args = parser.parse_args()
    try:
        where = load(DeviceSettings, "device")
        gpu = NvmlGpu(where.gpu)
        try:
            host = probe(vllm_python=where.vllm_python, clock_guard=where.clock_guard, wanted=True)
            device = device_for(args.gpu_type or type_of(gpu.name))
            lab = Lab(
                gpu=gpu,
                device=device,
                host=host,
                clock_guard=where.clock_guard,
                allow_clocks=args.allow_clocks,
                pace=args.pace,
            )
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / f"gpu-check-{slug(gpu.name)}.json"
            report = run(lab, say, lambda found: keep(found, path))
        finally:
            gpu.close()
    except FestinaError as error:
        sys.exit(f"gpu-check needs an NVIDIA GPU: {error}")
    except OSError as error:
        sys.exit(f"gpu-check cannot write its results: {error}; name another folder by --out")
    print("", *summary(report, device), f"written to {path}", sep="\n")
    sys.exit(report.failed)


def say(line: str) -> None:
    """Tell how it goes."""
    print(line, flush=True)


def keep(report: Report, path: Path) -> None:
    """Write what there is, so that a run that is cut short leaves it."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


if __name__ == "__main__":
    main()
