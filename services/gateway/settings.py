"""Every number the gateway's behaviour depends on."""

from shared.errors import ConfigError
from shared.model import Struct


class GatewaySettings(Struct):
    """Settings of one gateway. Raises ConfigError for a value that makes no sense.

    Args:
        host, port: where the REST API listens; port 0 takes a free one.
        ask_again_ms: a dispatch that nobody answers is sent again after this long; half-way, all schedulers
            are asked who has it, and one that says so has another such time.
        deferred_ask_ms: the same once a global scheduler has said that it keeps the request.
        dispatch_timeout_ms: an attempt that no GPU has taken by then fails with 503.
        ack_interval_ms: acknowledgements to a GPU are batched for this long.
        alive_interval_ms: time between two heartbeats of this gateway.
        drain_repeat_ms: a drain order is repeated this often until a placement shows it.
        drain_give_up_ms: but for no longer than this.
        check_interval_ms: time between two looks for silent GPUs.
        gpu_silent_ms: a GPU not heard of for this long is lost (three heartbeats).
        bus_grace_ms: after the bus is back, GPUs get this much longer to be heard of: they reconnect too.
        stall_timeout_ms: a request whose GPU makes no token for this long is started elsewhere.
        max_attempts: most attempts of one request, the first included.
        max_inflight: requests (choices) held at a time; beyond it clients get 429.
        max_body_bytes: largest request body; beyond it clients get 413.
        max_prompt_tokens: longest prompt that travels in one message of the bus (1 MiB); beyond it 413.
        stream_buffer: deliveries one client may lag behind before its request is cancelled.
        retry_after_s: what a client refused for lack of room is told to wait while nothing better is known.
        stop_report_ms: a request cut at a stop string waits this long for its GPU's report.
        assumed_output_tokens: what a call that sets no output limit is counted for, until it has ended.
        api_keys_file: TOML file of API keys, see `auth.py`; empty for none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    ask_again_ms: float = 2_000.0
    deferred_ask_ms: float = 5_000.0
    dispatch_timeout_ms: float = 60_000.0
    ack_interval_ms: float = 50.0
    alive_interval_ms: float = 500.0
    drain_repeat_ms: float = 1_000.0
    drain_give_up_ms: float = 60_000.0
    check_interval_ms: float = 250.0
    gpu_silent_ms: float = 1_500.0
    bus_grace_ms: float = 3_000.0
    stall_timeout_ms: float = 120_000.0
    max_attempts: int = 3
    max_inflight: int = 2_048
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int = 150_000
    stream_buffer: int = 1_024
    retry_after_s: float = 1.0
    stop_report_ms: float = 100.0
    assumed_output_tokens: int = 256
    api_keys_file: str = ""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            may_be_zero = name in ("port", "bus_grace_ms")
            if not isinstance(value, str) and (value < 0 or (value == 0 and not may_be_zero)):
                raise ConfigError(f"{name} must be positive, not {value}")
