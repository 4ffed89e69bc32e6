"""Every number the global scheduler's behaviour depends on, with the paper's section where it has one."""

from typing import Literal

from shared.errors import ConfigError
from shared.model import Struct
from shared.settings import require_positive


class GlobalSettings(Struct):
    """Settings of one global scheduler. Raises ConfigError for a value that makes no sense.

    Args:
        margin: added to a predicted output length, as a fraction (3.2.2: 5 %).
        output_quantile: quantile of the outputs seen that is predicted; higher reserves more memory and
            mispredicts fewer requests.
        prediction_window: outputs remembered per model and input-length class.
        prediction_save_ms: what was learnt about a model is stored at most this often.
        prediction_ttl_ms: what nobody has added to for this long is dropped from the store.
        choice: how a GPU is chosen (`choices.py`): ``least_energy`` as in 3.3, or as another system does.
        charge: a request answers for its ``part`` of the device's power, or by Eq. 2 for the ``device``.
        tie: energies within this fraction of the least are equal, and free memory decides (3.3: 2 %).
        best_effort: serve a request that no GPU can serve in time, late; else answer 503.
        stale_after_ms: a GPU silent for this long is not used (three heartbeats).
        forget_after_ms: a GPU silent for this long is forgotten.
        reservation_ttl_ms: a dispatch that the GPU's summaries do not confirm counts for this long.
        max_queued: dispatches an engine may have waiting before it counts as full.
        max_pending: requests kept until their model is loaded; beyond it the answer is 503.
        model_wait_ms: longest such wait before the answer is 503.
        resend_after_ms: a request asked for again this long after it was sent is sent again.
        remember_ms: time for which a sent request is remembered.
        max_remembered: sent requests remembered at most, and as many rejected ones; the oldest go first.
        max_start_ms: a new request that is expected to wait longer than this for its start is turned away.
        drain_window_ms: time constant over which requests served are counted per model, for that estimate.
        retry_refused_ms: a GPU that refused an attempt is tried again with it at most this often.
        retry_after_s: what a refused client is told to wait while nothing better is known.
        scale_out_repeat_ms: least time between two scale-out requests for one model.
        deficit_window_ms: time constant over which late dispatches are counted per model (3.3, phase three).
        deficit_requests: late dispatches within the window that make a deficit sustained.
        deficit_share: share of a model's dispatches that must be late as well.
    """

    margin: float = 0.05
    output_quantile: float = 0.8
    prediction_window: int = 256
    prediction_save_ms: float = 10_000.0
    prediction_ttl_ms: float = 30 * 86_400_000.0
    choice: Literal["least_energy", "in_time", "least_loaded", "eco_route", "where_loaded", "joins_group"] = (
        "least_energy"
    )
    charge: Literal["part", "device"] = "part"
    tie: float = 0.02
    best_effort: bool = True
    stale_after_ms: float = 1_500.0
    forget_after_ms: float = 600_000.0
    reservation_ttl_ms: float = 3_000.0
    max_queued: int = 512
    max_pending: int = 4096
    model_wait_ms: float = 30_000.0
    resend_after_ms: float = 500.0
    remember_ms: float = 30_000.0
    max_remembered: int = 65_536
    max_start_ms: float = 30_000.0
    drain_window_ms: float = 10_000.0
    retry_refused_ms: float = 1_000.0
    retry_after_s: float = 1.0
    scale_out_repeat_ms: float = 2_000.0
    deficit_window_ms: float = 10_000.0
    deficit_requests: float = 5.0
    deficit_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 < self.output_quantile < 1.0:
            raise ConfigError(f"output_quantile must lie between 0 and 1, not {self.output_quantile}")
        for name in ("margin", "tie", "deficit_share"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"{name} is a fraction and must not be negative: {getattr(self, name)}")
        amounts = ("_ms", "_s", "_window", "_requests")
        names = self.__struct_fields__
        require_positive(self, (n for n in names if n.startswith("max_") or n.endswith(amounts)))
