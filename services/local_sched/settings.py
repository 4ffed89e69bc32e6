"""Settings of a GPU's local scheduler: every number it decides by, with its source."""

from typing import Literal

import msgspec

from shared.errors import ConfigError


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a local scheduler can be told (3.4; numbers in parentheses point into docs/decisions.md).

    Args:
        heartbeat_ms: a summary is sent at least this often; its key expires after three.
        summary_interval_ms: least time between two summaries, so that none is sent per engine step.
        gateway_lease_ms: work of a gateway silent for longer is ended.
        gateway_forget_ms: the ends of that work are kept for this long, to be told if the gateway comes back.
        scheduler_lease_ms: what a global scheduler has sent is counted in the summary for this long after.
        max_queue: most requests waiting for memory or for a model to load; more are refused.
        max_running: most requests in one engine at a time.
        max_unacknowledged: most attempts whose unacknowledged tokens are kept to send again.
        max_remembered: most ended or aborted attempts remembered, so that a late repeat does not run.
        resend_ms: tokens unacknowledged for this long are sent again at the next heartbeat.
        beta: weight of a prefill's age in Eq. 4; the paper's 1 (15).
        starvation_ms: a prefill late by this long scores 1, as if it would use up all its slack (6).
        bypass_max_ms: a request passed over for want of memory for this long lets no other past it.
        memory_margin: share of the device's memory never promised to anyone; 5 % (3.5).
        short_memory: with a smaller share of the KV memory free than this, SMs that no deadline needs are
            given out all the same, so that requests leave sooner; while one waits for memory, the clock is
            at its highest (21).
        kv_pool_bytes: fixed KV pool per engine; 0 leaves the pools of emulated engines elastic, as the
            paper has them.
        fixed_pool_share: share of the device's memory that the fixed pool of any other engine gets when
            `kv_pool_bytes` is 0.
        offload_bytes: host memory for KV of evicted requests, which then need not be computed again; 0: none.
        offload_slab_bytes: about how much of that is given out at a time.
        load_timeout_ms, load_timeout_factor: an engine that is still loading after this long, and after so
            many times what its look-up table says, hangs; it is ended, and has failed.
        cold_after_ms: a device without engines for this long rests ``cold``: what holds its context is ended.
        off_after_ms: one without engines for this long is switched ``off``; 0: never, as its platform cannot.
        stall_ms, stall_factor: an engine that has work and makes no step for this long, and for so many times
            what its look-up table says of one, hangs; it is ended, and has failed.
        silence_ms: so is one of whose process nothing was heard for this long.
        shared_fate: engines are clients of one MPS server: a fatal fault of one takes all down, and none can
            start before all are gone. The one that died is left to the consolidator and its back-off.
        look_ms: engines with work are looked at this often.
        slack_headroom: share of each slack kept back for what the look-up table does not know.
        decision_interval_ms: least time between two decisions on clock, shares and plans.
        replan_ms: while work runs, a plan is looked at again after this long even if nothing changed.
        clock_dwell_ms: least time between two clock switches, unless a deadline is at risk (25).
        clock_min_gain: a lower clock must save at least this share of the energy to be worth a switch (25).
        clock, shares: how they are chosen: both by the joint ``sweep`` of 3.4, or one after the other, as
            other systems do (`policies/`).
        widening: the sweep considers, beside the least shares, those that fill the device; the paper's not.
        memory_pressure: scarce memory is a reason for wide shares and a high clock (21).
        turns: an engine takes prefills by Eq. 4 as long as all are ``in_time`` so, or by ``score`` alone.
        switching: models take turns on a GPU by this rule: its owner changes when a ``request`` has ended, or
            between any two a ``token``; as many as fit have it together (``shared``); ``off``: all that are
            placed there are loaded. Emulated engines only (`switching.py`).
        group_requests, quota_max_ms: most prompts in a group, and longest turn of a batch (Aegaeon's).
        quota_min_ms: shortest turn: what orders take to arrive is not among what changing models costs.
        static_rate_per_s, static_input_tokens, static_output_tokens: the load of each model that ``static``
            shares are made for; by default with the means of ShareGPT and its history.
        ecofreq_floor_mhz: lowest clock that EcoFreq takes.
        ecofreq_free_part: with a smaller part of the KV memory free than this, it takes the highest.
        fixed_chunk_tokens: chunks of prefill are so large; 0 lets deadlines decide.
        clock_limit_ms: after power or heat have held the clock lower than asked, no higher one is asked for
            this long.
        fixed_clock_mhz: pins the clock; None lets the sweep choose it.
        considered_prefills: most prefills per engine, earliest deadlines first, that the sweep weighs.
        chunk_part: a chunk of prefill takes at most this part of the shortest TTFT that a request of the
            model may ask for, so that one that comes during it can be in time: it waits for the end of this
            chunk, and is computed in the next.
        pacing: ``slack``: decode steps of an engine wait for their time, so that more requests share each
            read of the weights, where the device has a meter (`pacing.py`); ``off``: they never do.
        pace_part: the longest such time, from one step to the next, as a part of the shortest TBT there.
        ample_memory: it is that long while the free KV memory that is for the engine is at least so many
            times what its requests hold, and shorter in proportion to what there is.
        move_ttl_ms: a source takes a request back, and (twice this) a destination drops it, without news.
        report_steps: most decode steps that an emulated engine takes before it reports them; memory is
            promised ahead for so many. More than 1 is for simulations: nobody waits for the tokens there.
        oom_grace_ms: a device that says it is out of memory this soon after an eviction is not believed yet:
            the order to evict may still be on its way.
    """

    heartbeat_ms: float = 500.0
    summary_interval_ms: float = 20.0
    gateway_lease_ms: float = 5_000.0
    gateway_forget_ms: float = 120_000.0
    scheduler_lease_ms: float = 300_000.0
    max_queue: int = 512
    max_running: int = 256
    max_unacknowledged: int = 4096
    max_remembered: int = 8192
    resend_ms: float = 3_000.0
    beta: float = 1.0
    starvation_ms: float = 10_000.0
    bypass_max_ms: float = 2_000.0
    memory_margin: float = 0.05
    short_memory: float = 0.1
    kv_pool_bytes: int = 0
    fixed_pool_share: float = 0.25
    offload_bytes: int = 32 << 30
    offload_slab_bytes: int = 2 << 20
    load_timeout_ms: float = 180_000.0
    load_timeout_factor: float = 10.0
    cold_after_ms: float = 10_000.0
    off_after_ms: float = 0.0
    stall_ms: float = 1_000.0
    stall_factor: float = 5.0
    silence_ms: float = 500.0
    shared_fate: bool = False
    look_ms: float = 100.0
    slack_headroom: float = 0.15
    decision_interval_ms: float = 5.0
    replan_ms: float = 100.0
    clock_dwell_ms: float = 200.0
    clock_min_gain: float = 0.02
    clock: Literal["sweep", "default", "affinity", "ecofreq", "greenllm", "dynamollm"] = "sweep"
    shares: Literal["sweep", "all", "static", "demand"] = "sweep"
    widening: bool = True
    memory_pressure: bool = True
    turns: Literal["in_time", "score"] = "in_time"
    switching: Literal["off", "request", "shared", "token"] = "off"
    group_requests: int = 8
    quota_max_ms: float = 4_000.0
    quota_min_ms: float = 250.0
    static_rate_per_s: float = 1.0
    static_input_tokens: int = 682
    static_output_tokens: int = 296
    ecofreq_floor_mhz: int = 1005
    ecofreq_free_part: float = 0.1
    fixed_chunk_tokens: int = 0
    clock_limit_ms: float = 5_000.0
    fixed_clock_mhz: int | None = None
    considered_prefills: int = 16
    chunk_part: float = 0.3
    pacing: Literal["off", "slack"] = "slack"
    pace_part: float = 0.7
    ample_memory: float = 0.5
    move_ttl_ms: float = 5_000.0
    report_steps: int = 1
    oom_grace_ms: float = 20.0

    def __post_init__(self) -> None:
        if (self.clock == "sweep") != (self.shares == "sweep"):
            raise ConfigError(
                f"clock is {self.clock} and shares {self.shares}: the sweep chooses both or none"
            )
        if self.ample_memory <= 0.0:
            raise ConfigError(f"ample_memory must be positive, not {self.ample_memory}")
