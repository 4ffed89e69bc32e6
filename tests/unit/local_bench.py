"""A local scheduler's core on a bench: a fake engine, a clock moved by hand, and what was sent kept."""

import msgspec

from services.local_sched.core import LocalSchedCore
from services.local_sched.settings import LocalSettings
from shared import engine as en
from shared import events as ev
from shared.catalog import emulated_models
from shared.devices import DEVICES
from shared.lut import build
from shared.model import Objectives, Request

H100 = DEVICES["h100-80gb"]
MODEL, OTHER = emulated_models(2)
LUTS = {model.name: build(H100, model) for model in (MODEL, OTHER)}


def request(request_id="r1", attempt=1, gateway="g1", model=MODEL.name, prompt=100, max_tokens=50, **more):
    return Request(
        request_id=request_id,
        attempt=attempt,
        gateway=gateway,
        model=model,
        prompt_tokens=tuple(range(prompt)),
        max_tokens=max_tokens,
        objectives=Objectives(ttft_ms=400.0, tbt_ms=100.0),
        **more,
    )


class Bench:
    def __init__(self, device=H100, kind="emulated", models=(), elastic_kv=True, sleeps=False, **settings):
        self.core = LocalSchedCore(
            "gpu0",
            "host0",
            kind,
            device,
            LocalSettings(**{"stall_ms": 1e9} | settings),  # its engine makes a step when it is told to
            0.0,
            lut_for=lambda device, model: LUTS[model.name] if model.name in LUTS else build(device, model),
            elastic_kv=elastic_kv,
            sleeps=sleeps,
        )
        self.now_ms = 0.0
        self.seq = 0
        self.actions = []
        self.runs = {}  # what the engine calls each request's latest run
        self.do(ev.Tick())
        for model in models:
            self.do(ev.Load(model=model, placement_version=1))
            self.do(en.EngineReady(model=model.name, kv_pool_bytes=0, block_tokens=16, load_ms=1.0))

    @property
    def state(self):
        return self.core.state

    def do(self, event, after_ms=0.0):
        """Step with an event; returns the actions, and keeps all."""
        self.now_ms += after_ms
        done = self.core.step(self.now_ms, event)
        self.actions += done
        for order in of(done, en.RunRequest):
            self.runs[name_of(order)] = order.request.request_id
        return done

    def wait(self, ms):
        """Let time pass, ticking whenever the core asks for it."""
        done, end_ms = [], self.now_ms + ms
        while self.core.wake_ms <= end_ms:
            before_ms = self.now_ms
            self.now_ms = max(self.now_ms, self.core.wake_ms)
            done += self.do(ev.Tick())
            assert self.core.wake_ms > self.now_ms or self.now_ms > before_ms, "the core spins"
        self.now_ms = end_ms
        return done

    def submit(self, asked, predicted=20, scheduler="s1"):
        self.seq += 1
        return self.do(
            ev.Submit(
                request=asked, scheduler=scheduler, dispatch_seq=self.seq, predicted_output_tokens=predicted
            )
        )

    def token(self, *request_ids, model=MODEL.name, token=7, finish="", after_ms=10.0, energy_j=0.5):
        """One step that makes a token for each that runs; others have left and are no more in the report."""
        runs = [self.runs[i] for i in request_ids if i in self.runs]
        outputs = tuple(
            en.StepOutput(request_id=i, token_ids=(token,), finish_reason=finish, energy_j=energy_j)
            for i in runs
        )
        return self.do(en.StepDone(model=model, plan_id=0, duration_ms=after_ms, outputs=outputs), after_ms)

    def copied(self, request_id, tokens, n_bytes=0, took_ms=0.0, reason=""):
        """Report that full blocks of an evicted request's KV are in host memory, or why not."""
        exported = en.KvExported(
            model=MODEL.name,
            request_id=self.runs[request_id],
            move_id="",
            first_block=0,
            blocks=tokens // 16,
            total_blocks=tokens // 16,
            n_bytes=n_bytes,
            checksum=0,
            took_ms=took_ms,
            tokens=tokens,
            reason=reason,
            energy_j=0.25,
        )
        return self.do(exported)

    def summary(self):
        """What the core would say of itself now."""
        self.wait(self.state.settings.heartbeat_ms)
        return sent(self.actions, ev.SummaryChanged)[-1].summary

    def engine(self, model=MODEL.name):
        return next((e for e in self.summary().engines if e.model == model), None)


def sent(actions, message_type):
    return [a.message for a in actions if isinstance(a, ev.Send) and isinstance(a.message, message_type)]


def name_of(order):
    """The request that an order to an engine is about, without the number of the run."""
    run_id = order.request.request_id if isinstance(order, en.RunRequest) else order.request_id
    return run_id.partition("~")[0]


def names(actions, order_type):
    return [name_of(order) for order in of(actions, order_type)]


def of(actions, action_type):
    return [a for a in actions if isinstance(a, action_type)]


def deltas(actions):
    return [delta for message in sent(actions, ev.Tokens) for delta in message.deltas]


def wire(actions):
    """Encode all that is sent, as the shell would."""
    return [msgspec.msgpack.encode(a.message) for a in actions if isinstance(a, ev.Send)]
