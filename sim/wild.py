"""Scenarios at random, with faults at random: what the soak plays, one per seed."""

import dataclasses

from msgspec.structs import replace

from services.consolidator.settings import ConsolidatorSettings
from services.gateway.settings import GatewaySettings
from services.local_sched.settings import LocalSettings
from services.migrator.settings import MigratorSettings
from shared.model import ModelSpec
from sim.chance import Chance
from sim.scenario import Fault, Network, Scenario, Settings
from sim.workload import Arrival

FIRST_ARRIVAL_MS = 1_000.0
SPAN_MS = 8_000.0
GB = 10**9


def model(name: str, weight_gb: float, kv_bytes_per_token: int, **more: float | None) -> ModelSpec:
    """Return a small emulated model of this much weight."""
    params = int(weight_gb * GB / 2)
    spec = ModelSpec(
        name=name,
        engine="emulated",
        params=params,
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        weight_bytes=int(weight_gb * GB),
        kv_bytes_per_token=kv_bytes_per_token,
        context_tokens=4096,
    )
    return replace(spec, **more)


SMALL = model("small-3b", 6.4, 114_688)
MEDIUM = model("medium-8b", 16.0, 131_072, keep_alive_ms=2_500.0)
THICK = model("thick-14b", 28.0, 3_276_800)  # few of its requests fit at a time
LARGE = model("large-30b", 60.0, 196_608, keep_alive_ms=None)
MODELS = (SMALL, MEDIUM, THICK, LARGE)
PREDICTORS = ("live", "live", "oracle", "paper", "measured")
GREEDY = model("greedy-7b", 14.0, 80_000_000)  # memory is full with 700 of its tokens
LIGHT_PART = 0.6  # of the seeds with little memory: the KV of evicted requests is kept in host memory
LIGHT_KV_BYTES, LIGHT_TOKENS = 160_000, 2_000  # a token of theirs, and how many the memory has room for
LOW_QUANTILE = 0.1  # by which outputs are predicted there
TIGHT_PART = 0.3  # of the seeds: memory is short, and outputs are often longer than predicted
FIXED_PART = 0.2  # of the seeds: engines have KV pools of their own, as vLLM's


def scenario(seed: int) -> Scenario:
    """Return the scenario of a seed: some GPUs, some models, some requests, and some faults."""
    chance = Chance(seed)
    gpus = 1 + chance.below(3)
    models = tuple(m for m in MODELS if chance.happens(0.6)) or (SMALL,)
    gateways = 1 + chance.below(2)
    tight = chance.happens(TIGHT_PART)
    if tight:
        models = (GREEDY, *models[:1]) if models[0] is SMALL else (GREEDY,)
    arrivals = _arrivals(chance, models, tight)
    base = Scenario(
        models=models,
        arrivals=arrivals,
        gpus=gpus,
        seed=seed,
        gateways=gateways,
        schedulers=1 + chance.below(2),
        consolidators=1 + chance.below(2),
        hosts=1 + chance.below(gpus),
        settings=_settings(chance, tight),
        network=_network(chance),
        predictor=chance.pick(("measured", "paper") if tight else PREDICTORS),
        elastic_kv=not chance.happens(FIXED_PART),
        sample_ms=10_000.0,
    )
    if tight and chance.happens(LIGHT_PART):
        base = _with_light_kv(base)
    faults = tuple(_fault(chance, base) for _ in range(chance.below(7)))
    return replace(base, faults=tuple(sorted(faults, key=lambda fault: fault.at_ms)))


def _with_light_kv(base: Scenario) -> Scenario:
    """Return one that is as short of memory, with longer contexts and outputs, most of them underestimated.

    KV is so light there that a copy to host memory and back takes less time than to compute it again.
    """
    light = replace(GREEDY, kv_bytes_per_token=LIGHT_KV_BYTES)
    pool_bytes = LIGHT_TOKENS * LIGHT_KV_BYTES
    margin = base.settings.local.memory_margin
    arrivals = [
        replace(
            each, model=light.name, input_tokens=300 + each.input_tokens, output_tokens=2 * each.output_tokens
        )
        for each in base.arrivals
    ]
    return replace(
        base,
        models=(light,),
        arrivals=tuple(arrivals),
        device=dataclasses.replace(
            base.made_of, total_bytes=int((light.weight_bytes + pool_bytes) / (1.0 - margin)) + 1
        ),
        predictor="live",
        settings=replace(
            base.settings,
            scheduler=replace(base.settings.scheduler, output_quantile=LOW_QUANTILE),
            local=replace(base.settings.local, kv_pool_bytes=0 if base.elastic_kv else pool_bytes),
            consolidator=replace(base.settings.consolidator, min_kv_bytes=pool_bytes, min_kv_tokens=0),
        ),
    )


def _arrivals(chance: Chance, models: tuple[ModelSpec, ...], tight: bool) -> tuple[Arrival, ...]:
    gap_ms = chance.between(50.0, 200.0) if tight else chance.between(40.0, 400.0)
    longest = chance.pick((60, 150)) if tight else chance.pick((20, 60, 200))
    inputs = (50, 300) if tight else (100, 600, 3_000)
    at_ms, arrivals = FIRST_ARRIVAL_MS, []
    while at_ms < FIRST_ARRIVAL_MS + SPAN_MS:
        arrivals.append(
            Arrival(
                at_ms=at_ms,
                model=chance.pick(models).name,
                input_tokens=1 + chance.below(chance.pick(inputs)),
                output_tokens=1 + chance.below(longest),
                tenant=chance.pick(("default", "other")),
            )
        )
        at_ms += chance.pick((0.0, 1.0, 2.0)) * gap_ms * chance.uniform()
    return tuple(arrivals)


def _settings(chance: Chance, tight: bool) -> Settings:
    queue = chance.pick((512, 8))
    return Settings(
        gateway=GatewaySettings(max_inflight=chance.pick((2_048, 40)), stall_timeout_ms=20_000.0),
        local=LocalSettings(
            max_queue=queue,
            max_running=256 if tight else chance.pick((256, 4, 1)),
            max_unacknowledged=chance.pick((4_096, 4_096, 4_096, 16)),
            memory_margin=0.05 if tight else chance.pick((0.05, 0.3)),
        ),
        consolidator=ConsolidatorSettings(settle_ms=500.0),
        migrator=MigratorSettings(
            chunk_bytes=chance.pick((128 << 20, 1 << 20)),
            host_bytes_s=chance.pick((20e9, 1e12)),
            network_bytes_s=chance.pick((0.0, 1e12)),
        ),
    )


def _network(chance: Chance) -> Network:
    if chance.happens(0.4):
        return Network()
    return Network(
        delay_ms=chance.between(0.05, 2.0),
        jitter_ms=chance.between(0.0, 5.0),
        loss=chance.pick((0.0, 0.01, 0.05)),
        duplication=chance.pick((0.0, 0.01, 0.05)),
        reordering=chance.pick((0.0, 0.01, 0.05)),
        late_ms=chance.pick((5.0, 50.0, 500.0)),
    )


def _fault(chance: Chance, base: Scenario) -> Fault:
    at_ms = chance.between(0.0, FIRST_ARRIVAL_MS + SPAN_MS)
    gpu = f"gpu-{chance.below(base.gpus)}"
    replicas = {
        "gateway": base.gateways,
        "scheduler": base.schedulers,
        "consolidator": base.consolidators,
        "host": base.hosts,
        "gpu": base.gpus,
    }
    service = chance.pick(tuple(replicas))
    node = f"{service}-{chance.below(replicas[service])}"
    request = f"r{chance.below(len(base.arrivals))}"
    kind = chance.pick(_KINDS)
    short_ms, long_ms = chance.between(5.0, 800.0), chance.between(200.0, 6_000.0)
    for_ms = chance.pick((short_ms, long_ms))
    if kind in ("cancel", "stop"):
        index = int(request[1:])
        return Fault(base.arrivals[index].at_ms + chance.between(0.0, 2_000.0), kind, request)
    if kind in ("crash", "pause", "bus_lost"):
        return Fault(at_ms, kind, node, for_ms)
    if kind == "clock_step":
        return Fault(at_ms, kind, node, value=chance.between(-5_000.0, 5_000.0))
    if kind == "cut":
        return Fault(
            at_ms, kind, gpu, for_ms, other=chance.pick((f"gateway-{chance.below(base.gateways)}", "host-0"))
        )
    if kind in ("engine_lost", "stall"):
        return Fault(at_ms, kind, gpu, value=chance.pick((0.0, 1.0)), other=chance.pick(base.models).name)
    if kind == "lut":
        return Fault(at_ms, kind, chance.pick(base.models).name, value=chance.between(0.6, 1.6))
    if kind == "remove":
        return Fault(at_ms, kind, chance.pick(base.models).name, for_ms, chance.pick((-1.0, 1.0)))
    if kind == "move":
        how = chance.pick((-2.0, -1.0, 1.0, 2.0))  # of what waits or runs, one or each (`sim/faults.py`)
        return Fault(at_ms, kind, chance.pick(base.models).name, 600.0 + short_ms, how)
    value = {
        "stale": long_ms,
        "clock_refused": chance.pick((345.0, 1_980.0)),
        "memory": 40e9 * chance.uniform(),
    }
    return Fault(at_ms, kind, gpu, for_ms, value.get(kind, 0.0))


_KINDS = (
    *("crash", "crash", "pause", "bus_lost", "cut", "stale", "clock_refused", "memory", "device_lost"),
    *("engine_lost", "clock_step", "leave", "drain", "drain", "flush", "cancel", "cancel", "stop", "stop"),
    *("move", "move", "move", "move", "lut", "lut", "remove", "stall"),
)
