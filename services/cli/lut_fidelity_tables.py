"""Errors of the tables against the device model that they come from."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from services.cli.lut_fidelity import H100, Check, check_of, decode_work, prefill_work
from shared import lut, silicon
from shared.lut_samples import Sample
from shared.lut_table import Provenance
from shared.model import ModelSpec

SWEEP_TOKENS = (256, 512, 1024, 2048, 4096, 8192)  # lengths of the regression's samples


def interpolation(models: Sequence[ModelSpec]) -> list[Check]:
    """Tables at lengths outside the grid (257-8,192), at its clocks and shares, against the model itself.

    `built` are the tables as served; `regression` those that samples at six lengths give, as if profiled.
    """
    between = np.arange(257, 8192, 61)
    clocks, shares = [795, 975, 1155, 1335, 1515, 1635], [10, 30, 50, 80, 100]
    errors: dict[str, list[float]] = defaultdict(list)
    for model in models:
        built = lut.build(H100, model)
        sampled = lut.from_samples(
            H100, model, _samples(model, clocks, shares), Provenance(kind="measured", device="the model")
        )
        for clock in clocks:
            for share in shares:
                prefill = silicon.step_alone(H100, prefill_work(H100, model, between), clock, share / 100)
                decode = silicon.step_alone(H100, decode_work(H100, model, 32, between), clock, share / 100)
                for kind, table in (("built", built), ("regression", sampled)):
                    for subject, got, exact in (
                        ("TTFT", table.ttft_ms(clock, share, between), prefill[0]),
                        ("prefill power", table.prefill_power_w(clock, share, between), prefill[1]),
                        ("TBT", table.tbt_ms(clock, share, 32, between), decode[0]),
                        ("decode power", table.decode_power_w(clock, share, 32, between), decode[1]),
                    ):
                        errors[f"{subject}, {kind}"].extend((got / exact - 1).tolist())
    return [
        check_of("interpolation between lengths", subject, found, 1.0, 5.0)
        for subject, found in errors.items()
    ]


def _samples(model: ModelSpec, clocks: Sequence[int], shares: Sequence[int]) -> list[Sample]:
    samples = []
    for clock in clocks:
        for share in shares:
            for tokens in SWEEP_TOKENS:
                work = prefill_work(H100, model, tokens)
                ms, watts, _ = silicon.step_alone(H100, work, clock, share / 100)
                samples.append(Sample("prefill", clock, share, float(ms), float(watts), input_tokens=tokens))
                work = decode_work(H100, model, 32, tokens)
                ms, watts, _ = silicon.step_alone(H100, work, clock, share / 100)
                samples.append(
                    Sample("decode", clock, share, float(ms), float(watts), batch=32, context_tokens=tokens)
                )
    return samples
