"""How long a consolidation plan takes (3.5): capacity, placement and device mapping of a large cluster.

Phase one, which the plan is made from, is timed beside it: in it each model looks into a table of its own.
"""

import time
from dataclasses import replace

import numpy as np

from services.consolidator.capacity import Capacity
from services.consolidator.demand import Demand, Wanted
from services.consolidator.plan import assigned, groupings, planned
from services.consolidator.window import Load
from shared.catalog import entries
from shared.devices import device_for
from shared.lut import build
from shared.model import Objectives

GPUS, MODELS = 1_000, 2_000
TRIES = 3


def run() -> dict[str, float]:
    """Return the figures by name; each is the least of some tries, since the machine is shared."""
    device = device_for("h100-80gb")
    tables = [build(device, entry.spec()) for entry in entries()]
    draw = np.random.default_rng(0)
    capacity = Capacity(95.0, int(0.95 * device.total_bytes))
    loads = [Load(rate, 682.0, 296.0, 4_000.0) for rate in draw.lognormal(np.log(0.3), 1.0, MODELS).tolist()]
    started = time.perf_counter()
    demands: list[Demand] = []
    for number, load in enumerate(loads):
        wanted = Wanted(tables[number % len(tables)], load, Objectives(400.0, 100.0), 1 << 30, 2.33)
        copies = wanted.fewest_copies(capacity) or []
        demands += [replace(demand, model=f"{demand.model} {number}") for demand in copies]
    phase_one_s = time.perf_counter() - started
    names = sorted({demand.model for demand in demands})
    load_ms = {name: 200.0 + float(draw.uniform(6e9, 30e9)) / 6e6 for name in names}
    homes = draw.integers(GPUS, size=len(names))
    holds = {
        f"gpu-{g}": [name for name, home in zip(names, homes, strict=True) if home == g] for g in range(GPUS)
    }
    times_s = []
    for _ in range(TRIES):
        started = time.perf_counter()
        *_, groups = groupings(demands, GPUS, capacity)
        assert groups is not None, "the workload must fit"
        of_gpu, wake_ms = dict.fromkeys(holds, load_ms), dict.fromkeys(holds, 0.0)
        plan = planned(assigned(groups, holds, of_gpu, wake_ms), device, 0.0)
        times_s.append(time.perf_counter() - started)
    return {
        "plan.1000_gpus_2000_models_s": min(times_s),
        "plan.preferences_2000_models_s": phase_one_s,
        "plan.gpus_used": float(plan.outlook.used),
    }
