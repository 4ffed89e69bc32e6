"""`festina bound`: what a setting takes at least."""

from typing import Annotated

import typer
from rich.console import Console

from sim.cli import GpuType, Json, Llms, Seed, is_file, load_workload, pool_models, print_json

STEADY_MINUTES = 20.0  # of a made workload: the ends, where few requests share a step, weigh little then


def bound(
    workload: Annotated[
        str, typer.Option(help="Name of a workload, or a CSV of requests to replay.")
    ] = "sharegpt",
    llms: Llms = 16,
    rps: Annotated[
        float | None,
        typer.Option(help="Requests per second and model; 1 if left out, and a trace keeps its own."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, max=1024)] = 8,
    gpu_type: GpuType = "h100-80gb",
    minutes: Annotated[
        float | None,
        typer.Option(help=f"How long requests arrive; {STEADY_MINUTES:g} if left out, or a trace's own."),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """The least energy for which a setting can be served at all, whatever the policy.

    A fluid bound: memory, bandwidth, arithmetic, objectives and the device's power, and nothing else
    (docs/evaluation.md says what it leaves out).
    """
    from sim import tables
    from sim.bound import bound as least
    from sim.tasks import planned_device

    device = planned_device(gpu_type)
    models = pool_models(llms)
    made_minutes = minutes or STEADY_MINUTES
    load = load_workload(workload, models, rps, minutes, seed, None, made_minutes)
    span_ms = load.arrivals[-1].at_ms + 1.0 if minutes is None and is_file(workload) else made_minutes * 6e4
    answer = least(models, load.arrivals, device, gpus, span_ms)
    if as_json:
        print_json(answer)
        return
    title = f"at least: {workload}, {llms} LLMs, {gpus} x {gpu_type}"
    Console().print(tables.least(answer, device, title))
