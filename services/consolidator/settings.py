"""Every number of the consolidator that can be chosen."""

from shared.errors import ConfigError
from shared.model import Struct
from shared.settings import require_positive


class ConsolidatorSettings(Struct):
    """Settings of the consolidator. Raises ConfigError for a value that makes no sense.

    Args:
        settle_ms: after the start, time for the GPUs' summaries to arrive before anything is decided.
        gather_ms: models registered within this time of one another are placed together, largest first; one
            by one they would leave gaps that the last of them does not fit into.
        tick_ms: period of the comparison of placement and reality, and of the heartbeat to other replicas.
        peer_silent_ms: a replica not heard of for this long leads no more.
        safety_margin: share of a GPU's memory that placement leaves free (3.5.2: 5 %).
        min_kv_bytes, min_kv_tokens: KV memory that each placed model must at least find: so much, and for so
            many tokens (some five requests with the lengths of ShareGPT and its history).
        gpu_gone_ms: a GPU without a summary for this long is gone (three heartbeats).
        order_retry_ms: an order without visible effect is repeated after this long.
        load_backoff_ms: wait from a load that failed, or whose engine died, to the next; doubles with each
            failure, until an engine has lasted for the longest wait.
        load_backoff_max_ms: longest such wait.
        evict_idle_ms: a model must have been idle this long to make room for another. It protects one just
            loaded until the requests that wait for it arrive.
        passed_over_ms: once a model has waited for room for longer than a load takes, nothing is unloaded for
            others any more.
        room_short_ms: from then on GPUs do not take their time, until this long after the last has waited so.
        wanted_ms: time for which a request for a model is remembered while no GPU has room for it.
        scale_out_dwell_ms: least time between two further instances of one model.
        move_timeout_ms: a migrator silent for this long about a move has lost it.
        replica_keep_alive_ms: keep-alive of every instance but the last of a model that is to stay loaded.
        unknown_idle_ms: keep-alive of a loaded model that is not in the registry.
        consolidation: ``ewr`` as in 3.5; ``demand``: by SMs and memory, whatever clock models prefer; or
            ``none``: models stay where they were first placed.
        placement: GPUs come first for a model by how soon it is there (``near``), or, as in Prism, by the
            ``kv_pressure`` there (`pressure.py`).
        prefill_part: part of the GPUs that only compute prompts, where decodes are apart; 0: nothing is.
        window_ms: window over which each model's load is known (3.5.2: 5 minutes).
        observe_ms: least time of hearing before anything is concluded from that.
        consolidate_ms: slow period of looking, beside the ends of keep-alives.
        trigger_gap_ms: least time between two looks, and the longest that one waits for GPUs that change.
        survey_models: models whose needs are found in one go, at 10 ms each.
        survey_gap_ms: time for other work between two such goes, and between other steps of a look.
        dwell_ms: least time until the next change after a change, and after GPUs proved too few.
        caution: part by which GPUs are filled less after they proved too few while the load had not risen
            by more than this part.
        forget_ms: time after which that is tried again.
        least_saving: part of the predicted power by which a plan for as many GPUs as now must be better.
        least_served: predicted part of the SM share needed in time that a plan must leave, or as much as now.
        burst_sigmas: standard deviations above the mean number of requests for which a plan keeps KV memory.
        crowded_ms: time for which a GPU must need more than its SMs until its models are spread again.
        empty_state: what becomes of a GPU without models, by which plans are judged: it is kept ``warm`` or
            ``cold``, or is switched ``off`` as in the paper.
    """

    settle_ms: float = 1_500.0
    gather_ms: float = 700.0
    tick_ms: float = 500.0
    peer_silent_ms: float = 2_000.0
    safety_margin: float = 0.05
    min_kv_bytes: int = 256 << 20
    min_kv_tokens: int = 4_096
    gpu_gone_ms: float = 3_000.0
    order_retry_ms: float = 1_000.0
    load_backoff_ms: float = 1_000.0
    load_backoff_max_ms: float = 60_000.0
    evict_idle_ms: float = 500.0
    passed_over_ms: float = 5_000.0
    room_short_ms: float = 60_000.0
    wanted_ms: float = 10_000.0
    scale_out_dwell_ms: float = 5_000.0
    move_timeout_ms: float = 30_000.0
    replica_keep_alive_ms: float = 60_000.0
    unknown_idle_ms: float = 60_000.0
    consolidation: str = "ewr"
    placement: str = "near"
    prefill_part: float = 0.0
    window_ms: float = 300_000.0
    observe_ms: float = 120_000.0
    consolidate_ms: float = 60_000.0
    trigger_gap_ms: float = 10_000.0
    survey_models: int = 8
    survey_gap_ms: float = 10.0
    dwell_ms: float = 120_000.0
    caution: float = 0.25
    forget_ms: float = 3_600_000.0
    least_saving: float = 0.05
    least_served: float = 0.99
    burst_sigmas: float = 2.33
    crowded_ms: float = 1_000.0
    empty_state: str = "off"

    def __post_init__(self) -> None:
        if not 0.0 <= self.safety_margin < 1.0:
            raise ConfigError(f"safety_margin is a fraction below 1, not {self.safety_margin}")
        if self.consolidation not in ("ewr", "demand", "none"):
            raise ConfigError(f"consolidation is ewr, demand or none, not {self.consolidation!r}")
        if self.placement not in ("near", "kv_pressure"):
            raise ConfigError(f"placement is near or kv_pressure, not {self.placement!r}")
        if self.empty_state not in ("warm", "cold", "off"):
            raise ConfigError(f"empty_state is warm, cold or off, not {self.empty_state!r}")
        for name in ("least_served", "caution", "prefill_part"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is a fraction, not {getattr(self, name)}")
        for name in ("min_kv_bytes", "min_kv_tokens", "least_saving", "burst_sigmas"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)}")
        require_positive(self, ["survey_models"])
        require_positive(self, (name for name in self.__struct_fields__ if name.endswith("_ms")))
