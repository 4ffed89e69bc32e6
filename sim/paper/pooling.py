"""The second seed, Aegaeon (SOSP '25): the active-model bound, quotas, models per GPU, and the rate against
request-level scaling under its own objective (tokens in time)."""

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from services.local_sched.policies.aegaeon import quotas_ms
from sim.cells import Cell, Played
from sim.compare import ungoverned
from sim.page import Section, Sheet, drawing, svg
from sim.paper.entry import Claim, Results, Scale, claim, claims, there
from sim.workload import MARKET_RPS

MARKET_MODELS, SERVICE_S = 100, 16.79  # of the production trace: requests' mean time of service
ACTIVE, SIMULATED = 46.27, 46.55  # models of 100; the paper's own simulation
PER_GPU = (3, 5, 7)
MOST_PER_GPU = 7
GPUS = 2  # on which they are pooled
GAIN = (2.0, 2.5)  # times ServerlessLLM's rate at equal attainment
RATES = (0.05, 0.1, 0.2, 0.4)  # requests per second and model
WANTED = 0.9  # tokens in time
POOLERS = there("aegaeon", "serverlessllm")


def active_models(models: int, rate_rps: float, service_s: float) -> float:
    """Return how many models have a request at a moment, in the mean: M (1 - e^(-lambda T)), M/G/infinity."""
    return models * -math.expm1(-rate_rps * service_s)


def simulated_active(models: int, rate_rps: float, service_s: float, hours: float, seed: int = 0) -> float:
    """Return the same by drawing arrivals: the mean length of the union of their times of service."""
    rng, seconds, busy_s = np.random.default_rng(seed), hours * 3600, 0.0
    for _ in range(models):
        at_s = np.sort(rng.random(rng.poisson(rate_rps * seconds)) * seconds)
        busy_s += float(np.minimum(np.diff(at_s, append=math.inf), service_s).sum())
    return busy_s / seconds


def _cell(system: str, scale: Scale, **fields: object) -> Cell:
    cell = Cell(system=system, gpus=GPUS, minutes=max(2.0, scale.minutes), default_clock_mhz=None)
    return replace(cell, default_clock_mhz=1980 if ungoverned(system) else None, **fields)


def _pooled(scale: Scale) -> list[Cell]:
    return [
        _cell(system, scale, workload="market", llms=count * GPUS, rps=MARKET_RPS)
        for system in POOLERS
        for count in PER_GPU
    ]


def _rates(system: str, scale: Scale) -> list[Cell]:
    return [
        _cell(system, scale, llms=MOST_PER_GPU * GPUS, rps=rate, seed=seed)
        for rate in RATES
        for seed in scale.seeds_of(system)
    ]


def cells(scale: Scale) -> list[Cell]:
    """Return what is played: pools of the marketplace's load, and rates until tokens are late."""
    return [*_pooled(scale), *(cell for system in POOLERS for cell in _rates(system, scale))]


def show(results: Results, scale: Scale) -> Section:
    """The second seed's numbers beside ours."""
    drawn = simulated_active(MARKET_MODELS, MARKET_RPS, SERVICE_S, hours=10)
    told = [
        claim(
            "active models of 100, closed form",
            ACTIVE,
            active_models(MARKET_MODELS, MARKET_RPS, SERVICE_S),
            "",
            0.001,
        ),
        claim("active models of 100, simulated", SIMULATED, drawn, "", 0.02),
        *_quotas(),
    ]
    pooled = results.of(_pooled(scale))
    reached = [p.cell.llms / GPUS for p in pooled if p.cell.system == "aegaeon" and _tokens(p) >= WANTED]
    if "aegaeon" in POOLERS:
        told.append(
            claim(
                "models per GPU of the marketplace's load", MOST_PER_GPU, max(reached, default=0.0), "", 0.01
            )
        )
    figure, grid = drawing(1, 1, width=7.0, height=3.2)
    highest = {}
    for system in POOLERS:
        played = results.of(_rates(system, scale))
        shares = [float(np.mean([_tokens(p) for p in played if p.cell.rps == rate])) for rate in RATES]
        grid[0][0].plot(RATES, [100 * share for share in shares], "o-", label=system)
        highest[system] = highest_rate(RATES, shares, WANTED)
    grid[0][0].set(xlabel="requests/s per model", ylabel="tokens in time (%)", xscale="log")
    if highest:
        grid[0][0].legend()
    if len(highest) == 2 and highest["serverlessllm"]:
        gain = highest["aegaeon"] / highest["serverlessllm"]
        told.append(
            claim(
                f"rate against ServerlessLLM at {WANTED:.0%} of tokens in time, at least", GAIN[0], gain, "x"
            )
        )
    lines = tuple(
        (
            p.cell.system,
            f"{p.cell.llms / GPUS:g}",
            f"{_tokens(p):.1%}",
            f"{p.report.attainment.request or 0:.1%}",
            f"{p.report.loads}",
        )
        for p in pooled
    )
    header = ("system", "models per GPU", "tokens in time", "by request", "loads")
    missing = [name for name in ("aegaeon", "serverlessllm") if name not in POOLERS]
    notes = [
        f"Pools of {GPUS} GPUs. Attainment is Aegaeon's: tokens in time, buffered at the client. The"
        f" rates are those"
        f" of {MOST_PER_GPU} models per GPU; the highest rate is interpolated where the share falls"
        f" through {WANTED:.0%}.",
    ]
    if missing:
        notes.append(f"Not played, since there is no such system yet: {', '.join(missing)}.")
    return Section(
        name="aegaeon",
        title="The second seed: pooling by tokens",
        pictures=(svg(figure),),
        sheets=(claims(told), Sheet(header, lines, "The marketplace's load: 0.037 requests/s per model")),
        notes=tuple(notes),
    )


def _quotas() -> list[Claim]:
    """Return the published example: three batches, d = 0.1 s, t = 0.025 s, c = 3 s."""
    told = []
    for most_s, alpha, quota_s in ((3.0, 1.0, 3.0), (4.0, 0.9375, 4.0)):
        quotas, found = quotas_ms([25.0] * 3, [100.0] * 3, 3_000.0, most_s * 1000)
        told.append(claim(f"quota at Q_MAX {most_s:g} s", quota_s, quotas[0] / 1000, " s", 1e-9))
        told.append(claim(f"alpha at Q_MAX {most_s:g} s", alpha, found, "", 1e-9))
    return told


def highest_rate(rates: Sequence[float], shares: Sequence[float], wanted: float) -> float:
    """Return the highest rate with that share of tokens in time, linear in between; 0 if none has."""
    best = 0.0
    for index, (rate, share) in enumerate(zip(rates, shares, strict=True)):
        if share >= wanted:
            best = rate
        elif index and shares[index - 1] >= wanted:
            part = (shares[index - 1] - wanted) / (shares[index - 1] - share)
            best = max(best, rates[index - 1] + part * (rate - rates[index - 1]))
    return best


def _tokens(played: Played) -> float:
    return played.report.attainment.token or 0.0
