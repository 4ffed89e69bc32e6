"""What a world is asked to play, and what it tells: plain data."""

from dataclasses import dataclass, field

from services.consolidator.settings import ConsolidatorSettings
from services.gateway.settings import GatewaySettings
from services.global_sched.predict import Learnt
from services.global_sched.settings import GlobalSettings
from services.local_sched.settings import LocalSettings
from services.migrator.settings import MigratorSettings
from shared.devices import Device, device_for
from shared.model import ModelSpec, Objectives, Struct
from sim.workload import Arrival


class Network(Struct):
    """How the bus treats each copy of a message on its way to one reader.

    Args:
        delay_ms, jitter_ms: time on the way: the delay and up to the jitter more. Between two nodes messages
            stay in order, as on one connection.
        loss, duplication, reordering: probability that one is lost, comes twice, or is overtaken.
        late_ms: a copy that is reordered or duplicated comes up to this much later.
    """

    delay_ms: float = 0.2
    jitter_ms: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    late_ms: float = 50.0


class Fault(Struct):
    """Something that goes wrong at a time; `sim/faults.py` tells the kinds.

    Args:
        target: the node, by id, or the request it happens to.
        for_ms: how long it lasts.
        value: how much, in the kind's own unit.
        other: the second node, where there are two.
    """

    at_ms: float
    kind: str
    target: str = ""
    for_ms: float = 0.0
    value: float = 0.0
    other: str = ""


class Settings(Struct):
    """Settings of the services, all as shipped unless said otherwise."""

    gateway: GatewaySettings = GatewaySettings()
    scheduler: GlobalSettings = GlobalSettings()
    local: LocalSettings = LocalSettings()
    consolidator: ConsolidatorSettings = ConsolidatorSettings()
    migrator: MigratorSettings = MigratorSettings()


FAST = Settings(
    local=LocalSettings(report_steps=32, summary_interval_ms=100.0),
    gateway=GatewaySettings(ack_interval_ms=250.0),
)
"""As shipped, but up to 32 decode steps are reported at once; summaries and acknowledgements come less often.

See docs/simulator.md, Speed. For networks that lose nothing.
"""


class Scenario(Struct):
    """A cluster, what its clients ask of it, and what goes wrong.

    Args:
        models: registered from the start; placed by the consolidator.
        arrivals: requests by time, in ms from the start; `output_tokens` of each is what its model answers.
        hosts: GPUs are spread over so many hosts, one migrator each.
        device: what every GPU is, and its tables are made for, instead of the row of `gpu_type`.
        default_clock_mhz: clock of a device that nobody governs; None as the device has it.
        max_tokens: bound on the output that clients set; None leaves it at the model's context.
        predictor: ``live`` learns as in service; ``oracle``, ``paper`` and ``measured`` know the truth, with
            the error of that name in `services/global_sched/predict_standin.py`.
        learnt: what the schedulers have learnt about outputs before the world begins.
        least_ms: the world lasts this long at least, even if it is at rest.
        horizon_ms: the world ends then, whatever is unfinished; None lets all requests end, and come to rest.
        sample_ms: period of the time series of the result.
        device_sample_ms: period at which a local scheduler reads its device.
        clock_offsets_ms: by node, how far its wall clock is from the others'.
    """

    models: tuple[ModelSpec, ...]
    arrivals: tuple[Arrival, ...]
    gpus: int = 1
    gpu_type: str = "h100-80gb"
    device: Device | None = None
    seed: int = 0
    gateways: int = 1
    schedulers: int = 1
    consolidators: int = 1
    hosts: int = 1
    default_clock_mhz: int | None = None
    settings: Settings = Settings()
    network: Network = Network()
    faults: tuple[Fault, ...] = ()
    predictor: str = "live"
    learnt: tuple[Learnt, ...] = ()
    max_tokens: int | None = None
    least_ms: float = 0.0
    horizon_ms: float | None = None
    elastic_kv: bool = True
    sample_ms: float = 1_000.0
    device_sample_ms: float = 250.0
    clock_offsets_ms: dict[str, float] = {}

    @property
    def made_of(self) -> Device:
        """What every GPU is."""
        return self.device or device_for(self.gpu_type)


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it; times in ms of the world.

    Args:
        token_ms: when each output token reached the client.
        outcome: ``stop`` or ``length``; ``cancelled``; ``client_lost`` with its gateway; ``unfinished``; else
            the code of the failure. Empty while it is open.
        attempts: attempts it took.
        energy_j: as reported with its end; None if it is not known.
    """

    request_id: str
    model: str
    tenant: str
    objectives: Objectives
    arrived_ms: float
    input_tokens: int
    expected_tokens: int
    gateway: str = ""
    token_ms: list[float] = field(default_factory=list)
    ended_ms: float | None = None
    outcome: str = ""
    gpu: str = ""
    attempts: int = 0
    energy_j: float | None = None

    @property
    def output_tokens(self) -> int:
        """Output tokens that the client has."""
        return len(self.token_ms)

    @property
    def first_token_ms(self) -> float | None:
        """When the first token came."""
        return self.token_ms[0] if self.token_ms else None


class DeviceSample(Struct, array_like=True):
    """One device at one moment; energies and times are totals since the start.

    Args:
        parts_j: (floor, context, clock, HBM, compute): powered on; a context kept; SMs clocked; bytes read;
            arithmetic. They add up to `energy_j`.
        busy_ms, warm_ms, empty_ms: time with a step running or a model loading; idle with engines; without.
        sleeping_ms, off_ms: parts of `empty_ms`; in the rest of it the device was cold.
    """

    at_ms: float
    clock_mhz: int
    power_w: float
    residents: int
    running: int
    waiting: int
    energy_j: float
    parts_j: tuple[float, float, float, float, float]
    busy_ms: float
    warm_ms: float
    empty_ms: float
    sleeping_ms: float = 0.0
    off_ms: float = 0.0


@dataclass(slots=True)
class DeviceRecord:
    """One device: its samples, the last taken at the end of the run, and what its energy was for.

    `request_j`, `overhead_j` and `idle_j` add up to the last sample's `energy_j`.
    """

    gpu: str
    samples: list[DeviceSample] = field(default_factory=list)
    request_j: float = 0.0
    overhead_j: float = 0.0
    idle_j: float = 0.0


@dataclass(slots=True)
class Result:
    """What came of a scenario.

    Args:
        ended_ms: time of the world at its end.
        counters: by service and name (and side, outcome or reason), summed over its replicas.
        events: events that cores and devices took.
        trace_hash: hash of all that happened; equal for equal scenarios.
        wall_s: filled in by who has a clock.
    """

    requests: list[RequestRecord]
    devices: list[DeviceRecord]
    counters: dict[str, float]
    ended_ms: float
    events: int
    trace_hash: str
    wall_s: float = 0.0
