"""Whatever the bus does to messages, every request ends once and its tokens are gapless and in order."""

from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core import Arrived, ClientGone, Deliver, Fail, GatewayCore
from services.gateway.settings import GatewaySettings
from shared import events as ev
from shared.model import GpuSummary, Objectives, Request, RequestEnd

GPUS = ("a", "b", "c")
IDS = ("r0", "r1", "r2")
LENGTH = 6


def summary(gpu: str, seq: int, started_ms: float) -> ev.SummaryChanged:
    fields: dict[str, Any] = {"host": "h", "gpu_type": "t", "engine": "vllm", "state": "active"}
    sizes = {"sm_clock_mhz": 1, "total_bytes": 1, "free_bytes": 1}
    return ev.SummaryChanged(summary=GpuSummary(gpu=gpu, started_ms=started_ms, seq=seq, **fields, **sizes))


def request(request_id: str) -> Request:
    return Request(
        request_id=request_id,
        attempt=1,
        gateway="gw",
        model="m",
        prompt_tokens=(1,),
        max_tokens=LENGTH,
        objectives=Objectives(ttft_ms=1.0, tbt_ms=1.0),
        sampling={"temperature": 0.0},
    )


def piece(draw: st.DataObject, request_id: str) -> ev.TokenDelta:
    """Any part of a request's output, which is the same whoever makes it: token i is i."""
    first = draw.draw(st.integers(0, LENGTH - 1))
    last = draw.draw(st.integers(first, LENGTH))
    end = None
    ending = draw.draw(st.sampled_from(("no", "no", "error", "end")))
    if ending == "error":
        end = RequestEnd(finish_reason="error", error="x")
    elif ending == "end" and last == LENGTH:
        end = RequestEnd(finish_reason="length")
    return ev.TokenDelta(
        request_id=request_id,
        attempt=draw.draw(st.integers(1, 3)),
        first_seq=first,
        token_ids=tuple(range(first, last)),
        end=end,
    )


def message(draw: st.DataObject, step: int) -> ev.Message | ev.Event:
    """Any message at all, as duplicated, late and out of order as a bus can make it."""
    request_id, gpu = draw.draw(st.sampled_from(IDS)), draw.draw(st.sampled_from(GPUS))
    attempt = draw.draw(st.integers(1, 3))
    kind = draw.draw(st.integers(0, 11))
    if kind <= 4:
        return ev.Tokens(
            gpu=gpu, deltas=(piece(draw, request_id), piece(draw, draw.draw(st.sampled_from(IDS))))
        )
    if kind <= 6:
        return ev.Admitted(request_id=request_id, attempt=attempt, gpu=gpu)
    if kind == 7:
        return ev.Deferred(request_id=request_id, attempt=attempt, scheduler="s", reason="x")
    if kind == 8:
        return ev.Moved(
            request_id=request_id, attempt=attempt, source=gpu, destination=draw.draw(st.sampled_from(GPUS))
        )
    if kind == 9:
        return summary(gpu, step, started_ms=float(draw.draw(st.integers(1, 2))))
    if kind == 10:
        return draw.draw(st.sampled_from((ev.BusLost(), ev.BusRestored(), ClientGone(request_id, "left"))))
    return draw.draw(
        st.sampled_from(
            (
                ev.Tick(),
                ev.Rejected(request_id=request_id, attempt=attempt, status=503, code="c", message="m"),
            )
        )
    )


class Observer:
    """Holds the core to its word."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, str] = {}

    def hear(self, event: ev.Message | ev.Event, actions: list[ev.Action], live: int) -> None:
        if isinstance(event, ClientGone) and event.request_id not in self.ended:
            self.ended[event.request_id] = "gone"
        for action in actions:
            if isinstance(action, Deliver):
                assert action.request_id not in self.ended, "something after the end"
                self.tokens[action.request_id] += action.token_ids
                assert self.tokens[action.request_id] == list(range(len(self.tokens[action.request_id])))
                if action.end is not None:
                    assert action.end.finish_reason != "error"
                    self.ended[action.request_id] = "end"
            elif isinstance(action, Fail):
                assert action.request_id not in self.ended, "two ends"
                self.ended[action.request_id] = "fail"
            elif isinstance(action, ev.Send) and isinstance(action.message, ev.Dispatch):
                asked = action.message.request
                assert asked.request_id not in self.ended
                assert list(asked.output_tokens) == self.tokens[asked.request_id]
                assert 1 <= asked.attempt <= 3
        assert live == len(IDS) - len(self.ended)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_one_end_each_and_tokens_gapless_in_order(draw: st.DataObject) -> None:
    core, observer, now_ms = GatewayCore("gw", GatewaySettings()), Observer(), 1000.0
    for number, request_id in enumerate(IDS):
        core.step(now_ms, Arrived(request(request_id)))
        assert core.inflight == number + 1
    for step in range(draw.draw(st.integers(1, 40))):
        now_ms += draw.draw(st.sampled_from((0.0, 1.0, 60.0, 700.0, 6000.0)))
        event = message(draw, step)
        observer.hear(event, core.step(now_ms, event), core.inflight)
    event = ev.BusRestored()
    observer.hear(event, core.step(now_ms, event), core.inflight)
    # left alone, with nobody answering, whatever is still open fails in bounded time, by its own clock
    deadline_ms = now_ms + 4 * 60_000.0 + 10_000.0
    while core.inflight:
        wake_ms = core.wake_ms
        assert wake_ms is not None and wake_ms <= deadline_ms
        now_ms = max(now_ms, wake_ms)
        observer.hear(ev.Tick(), core.step(now_ms, ev.Tick()), core.inflight)
    assert set(observer.ended) == set(IDS)


class LossyPool:
    """GPUs and schedulers as they should behave, behind a bus that loses, repeats and reorders."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str, int], int] = {}  # (gpu, request, attempt) -> first token to make
        self.acked: dict[tuple[str, str, int], int] = {}

    def hear(self, action: ev.Send) -> None:
        message = action.message
        if isinstance(message, ev.Dispatch):
            free = [gpu for gpu in GPUS if gpu not in message.excluded]
            gpu = free[message.request.attempt % len(free)]
            key = (gpu, message.request.request_id, message.request.attempt)
            self.runs.setdefault(key, len(message.request.output_tokens))
            self.acked.setdefault(key, self.runs[key])
        elif isinstance(message, ev.Abort):
            for key in [
                k for k in self.runs if k[:2] == (action.to, message.request_id) and k[2] <= message.attempt
            ]:
                del self.runs[key]
        elif isinstance(message, ev.Ack):
            for acked in message.acks:
                key = (action.to, acked.request_id, acked.attempt)
                if acked.ended:
                    self.runs.pop(key, None)
                elif key in self.acked:
                    self.acked[key] = max(self.acked[key], acked.next_seq)

    def unacknowledged(self) -> list[ev.Message]:
        return [
            ev.Tokens(
                gpu=gpu,
                deltas=(
                    ev.TokenDelta(
                        request_id=request_id,
                        attempt=attempt,
                        first_seq=self.acked[gpu, request_id, attempt],
                        token_ids=tuple(range(self.acked[gpu, request_id, attempt], LENGTH)),
                        end=RequestEnd(finish_reason="length"),
                    ),
                ),
            )
            for gpu, request_id, attempt in self.runs
        ]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_behind_a_lossy_bus_every_request_is_served_in_full(draw: st.DataObject) -> None:
    core, pool, observer, now_ms = GatewayCore("gw", GatewaySettings()), LossyPool(), Observer(), 1000.0
    events: list[ev.Message | ev.Event] = [Arrived(request(request_id)) for request_id in IDS]
    for event in events:
        for action in core.step(now_ms, event):
            if isinstance(action, ev.Send) and draw.draw(st.booleans()):
                pool.hear(action)
    for turn in range(400):
        if not core.inflight:
            break
        lossy = turn < 20
        now_ms += 50.0
        events = [summary(gpu, turn, 1.0) for gpu in GPUS]
        for message in pool.unacknowledged():
            copies = draw.draw(st.integers(0, 2)) if lossy else 1
            events += [message] * copies
        events.append(ev.Tick())
        for event in draw.draw(st.permutations(events)) if lossy else events:
            actions = core.step(now_ms, event)
            observer.hear(event, actions, core.inflight)
            for action in actions:
                if isinstance(action, ev.Send) and (not lossy or draw.draw(st.booleans())):
                    pool.hear(action)
    assert observer.ended == dict.fromkeys(IDS, "end")
    assert all(observer.tokens[request_id] == list(range(LENGTH)) for request_id in IDS)
