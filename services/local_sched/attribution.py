"""What the steps of an engine took that does not tell: by the look-up table, and whose it was (3.4).

No device measures its engines one by one. The table's power at the clock and share of the step, over the time
that it took, is what the step drew; static power falls on the engines that run by their SM shares, as in
Eq. 2. Within a step, requests share by the time that the table says each would take. The meter, which is
right about the whole device, shows what this is off by as the energy book's residual.
"""

from msgspec.structs import replace

from services.local_sched.state import Engine, State
from shared.engine import StepDone


def with_joules(state: State, engine: Engine, event: StepDone) -> StepDone:
    """Return a report with each request's joules, modelled where its engine does not tell them."""
    outputs = event.outputs
    untold = outputs and outputs[0].energy_j is None
    if not untold or engine.plan is None or not state.device.has_meter:
        return event
    at = (state.clock_mhz, engine.plan.sm_share_pct)
    prefills = [output.prefilled_tokens for output in outputs if output.prefilled_tokens]
    decodes = len(outputs) - len(prefills)
    works = [work for output in outputs if (work := engine.running.get(output.request_id))]
    context_tokens = sum([work.context_tokens for work in works]) / max(1, len(works))
    decode_ms = engine.lut.tbt_ms(*at, decodes, context_tokens) / decodes if decodes else 0.0
    parts_ms = [
        engine.lut.ttft_ms(*at, output.prefilled_tokens) if output.prefilled_tokens else decode_ms
        for output in outputs
    ]
    total_ms = sum(parts_ms)
    prefill_w = engine.lut.prefill_power_w(*at, sum(prefills)) if prefills else 0.0
    decode_w = engine.lut.decode_power_w(*at, decodes, context_tokens) if decodes else 0.0
    prefill_part = 1.0 - decodes * decode_ms / total_ms
    power_w = prefill_part * prefill_w + (1.0 - prefill_part) * decode_w
    power_w -= state.device.static_w * (1.0 - _part(state, engine))
    step_j = power_w * event.duration_ms / 1000.0
    told = tuple(
        [replace(o, energy_j=step_j * ms / total_ms) for o, ms in zip(outputs, parts_ms, strict=True)]
    )
    return replace(event, outputs=told)


def _part(state: State, engine: Engine) -> float:
    """Return the part of the running engines' SM shares that is this engine's."""
    running = [each for each in state.engines.values() if each.running or each is engine]
    shares = {each.spec.name: each.plan.sm_share_pct for each in running if each.plan is not None}
    return shares[engine.spec.name] / sum(shares.values())
