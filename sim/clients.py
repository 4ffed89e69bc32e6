"""The clients of a world: they send requests to gateways, and keep what comes back."""

from collections.abc import Callable, Sequence

from services.gateway.events import STOPPED, Arrived, ClientGone, Deliver, Fail
from services.local_sched.made_up import Answer, answer
from shared.model import ModelSpec, Request
from shared.slo import objectives_for
from sim.nodes import VOCAB, Node
from sim.scenario import RequestRecord, Scenario

Complain = Callable[..., None]


class Clients:
    """All requests of a scenario, by their place among the arrivals.

    Args:
        complain: called with what is wrong, and whom it is about.
        feed: gives a gateway an event.
    """

    def __init__(
        self,
        scenario: Scenario,
        feed: Callable[[Node, Arrived | ClientGone], None],
        complain: Complain | None,
    ) -> None:
        self._scenario = scenario
        self._models = {model.name: model for model in scenario.models}
        self._longest = tuple(range(max((a.input_tokens for a in scenario.arrivals), default=0)))
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._feed = feed
        self._complain = complain
        self._answers: dict[str, Answer] = {}
        self._gateways: dict[str, Node] = {}  # of open requests
        self._stopping: set[str] = set()
        self.records: dict[str, RequestRecord] = {}
        self.open = len(scenario.arrivals)

    def true_tokens(self, request: Request) -> int:
        """Return how many tokens the answer to a request, or to a run of it, has."""
        index: int = request.sampling["seed"]
        return self._scenario.arrivals[index].output_tokens

    def arrive(self, now_ms: float, index: int, gateways: Sequence[Node]) -> None:
        """Send a request to its gateway, or to the next that is up."""
        arrival = self._scenario.arrivals[index]
        request_id = f"r{index}"
        objectives = objectives_for(arrival.input_tokens)
        model = self._models.get(arrival.model)
        if model is not None and model.objectives is not None:
            objectives = model.objectives
        record = self.records[request_id] = RequestRecord(
            request_id=request_id,
            model=arrival.model,
            tenant=arrival.tenant,
            objectives=objectives,
            arrived_ms=now_ms,
            input_tokens=arrival.input_tokens,
            expected_tokens=arrival.output_tokens,
        )
        turns = [gateways[(index + i) % len(gateways)] for i in range(len(gateways))]
        gateway = next((g for g in turns if g.core is not None), None)
        if gateway is None:
            self._end(record, now_ms, "no_gateway")
            return
        record.gateway = gateway.ident
        request = self._request(request_id, index, record, model, gateway.ident)
        if self._complain is not None and model is not None:
            self._answers[request_id] = answer(request, VOCAB, model.context_tokens, arrival.output_tokens)
        self._gateways[request_id] = gateway
        self._feed(gateway, Arrived(request=request))

    def _request(
        self, request_id: str, index: int, record: RequestRecord, model: ModelSpec | None, gateway: str
    ) -> Request:
        context_tokens = model.context_tokens if model else 8192
        prompt = self._prompts.get(record.input_tokens)
        if prompt is None:
            prompt = self._prompts[record.input_tokens] = self._longest[: record.input_tokens]
        most = max(1, context_tokens - record.input_tokens)
        return Request(
            request_id=request_id,
            attempt=1,
            gateway=gateway,
            model=record.model,
            prompt_tokens=prompt,
            max_tokens=min(most, self._scenario.max_tokens or most),
            objectives=record.objectives,
            tenant=record.tenant,
            sampling={"seed": index},
        )

    def deliver(self, now_ms: float, action: Deliver) -> None:
        """Take tokens, and the end with the last; they must be the very next ones of the answer."""
        record = self.records[action.request_id]
        fresh = len(action.token_ids)
        if self._complain is not None:
            self._judge(record, action)
        times = record.token_ms
        if fresh == 1 or not action.ages_ms:
            times += [now_ms] * fresh
        elif fresh:
            ages_ms = action.ages_ms[-fresh:]
            before_ms = times[-1] if times else 0.0  # what was on its way for longer is not overtaken
            times += [now_ms - ages_ms[0]] * (fresh - len(ages_ms))
            times += [max(before_ms, now_ms - age_ms) for age_ms in ages_ms]
        record.gpu, record.attempts = action.gpu, action.attempt
        if action.end is not None:
            record.energy_j = action.end.energy_j
            self._end(record, now_ms, action.end.finish_reason)

    def _judge(self, record: RequestRecord, action: Deliver) -> None:
        complain, about = self._complain, record.request_id
        assert complain is not None
        if record.outcome:
            complain(f"{about} gets more after its end ({record.outcome})", about)
        if action.attempt < record.attempts:
            complain(f"{about}: attempt {action.attempt} delivers after attempt {record.attempts}", about)
        expected = self._answers[about]
        have = record.output_tokens
        for index, token_id in enumerate(action.token_ids, start=have):
            wanted, reason = expected.token(index)
            if token_id != wanted:
                complain(f"{about}: token {index} is {token_id}, its answer has {wanted}", about)
            ended = index - have == len(action.token_ids) - 1 and action.end is not None
            if reason and not ended:
                complain(
                    f"{about}: token {index} ends the answer ({reason}), and comes without an end", about
                )
        if action.end is not None and about not in self._stopping:
            have += len(action.token_ids)
            reason = expected.token(have - 1)[1] if have else ""
            full = action.end.finish_reason == "length" and self._fills_memory(record, have)
            if action.end.finish_reason != reason and not full:
                complain(
                    f"{about} ends by {action.end.finish_reason!r} after {have} tokens, its answer {reason!r}"
                    f" at {record.expected_tokens}",
                    about,
                )

    def _fills_memory(self, record: RequestRecord, output_tokens: int) -> bool:
        """Say whether a request may be cut off because a GPU beside its models holds no more tokens of it."""
        scenario = self._scenario
        device = scenario.made_of
        settings = scenario.settings.local
        room_bytes = device.total_bytes * (1.0 - settings.memory_margin)
        pool_bytes = room_bytes if scenario.elastic_kv else settings.fixed_pool_share * room_bytes
        room_bytes = min(pool_bytes, room_bytes - sum(model.weight_bytes for model in scenario.models))
        tokens = record.input_tokens + output_tokens + device.block_tokens
        return tokens * self._models[record.model].kv_bytes_per_token >= room_bytes

    def fail(self, now_ms: float, action: Fail) -> None:
        """Take a failure."""
        record = self.records[action.request_id]
        if record.outcome and self._complain is not None:
            self._complain(f"{action.request_id} fails after its end ({record.outcome})", action.request_id)
        self._end(record, now_ms, action.code)

    def leave(self, request_id: str, reason: str) -> None:
        """Let the client of a request go, if it is still there."""
        gateway = self._gateways.get(request_id)
        if gateway is None or gateway.core is None:
            return
        if reason == STOPPED:
            self._stopping.add(request_id)
        self._feed(gateway, ClientGone(request_id=request_id, reason=reason))
        if reason != STOPPED:
            self._end(self.records[request_id], gateway.last_ms - gateway.offset_ms, "cancelled")

    def gateway_gone(self, now_ms: float, gateway: Node) -> None:
        """The connections that a gateway held are closed."""
        for request_id in [r for r, g in self._gateways.items() if g is gateway]:
            self._end(self.records[request_id], now_ms, "client_lost")

    def _end(self, record: RequestRecord, now_ms: float, outcome: str) -> None:
        record.outcome, record.ended_ms = outcome, now_ms
        self.open -= 1
        self._gateways.pop(record.request_id, None)
        self._answers.pop(record.request_id, None)
