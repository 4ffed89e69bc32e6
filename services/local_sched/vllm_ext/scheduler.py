"""vLLM's scheduler, made to obey a standing plan: who may run, and how much prompt a step may compute (3.4).

Holding a request keeps its KV; what it goes on to write is what it would have written without the hold. The
hooks used here are private to vLLM, so exactly one version of it is accepted.
"""

import math
from collections.abc import Mapping
from typing import Any

import vllm
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from shared.errors import FestinaError
from shared.model import Plan

VLLM_VERSION = "0.32.0"

NEVER = 1 << 62
"""A scheduler step that no engine reaches."""


def check_vllm_version() -> None:
    """Raise FestinaError unless vLLM is the version whose private names this file relies on."""
    found = vllm.__version__.split("+")[0]
    if found != VLLM_VERSION:
        raise FestinaError(
            f"vLLM {found} is installed, but its scheduler hooks are known only for {VLLM_VERSION}: "
            "set up the engine environment again."
        )


def external_id(request_id: str) -> str:
    """Return the id a request was given to vLLM under; vLLM appends a dash and eight random characters."""
    return request_id.rsplit("-", 1)[0]


class PlanScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not there to be type-checked against
    """Runs the requests that the plan does not hold: decodes, then prefills in the order of the plan.

    After each `schedule`, `prefilled` says how many prompt tokens the step computes for each request in it
    (0 for a decode), and `starved` which requests vLLM has taken out of the batch for want of KV blocks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan = Plan(plan_id=0)
        self._made_way: set[str] = set()
        self.prefilled: dict[str, int] = {}
        self.starved: tuple[str, ...] = ()

    def has_runnable(self) -> bool:
        """Return whether a step may find something to do; if not, the caller waits for an order."""
        return self.has_finished_requests() or any(
            external_id(request.request_id) not in self.plan.held
            and (self.plan.chunk_tokens > 0 or not _prefilling(request))
            for request in self.requests.values()
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step under the plan."""
        turns = {request_id: turn for turn, request_id in enumerate(self.plan.order)}
        self.running.sort(
            key=lambda request: _turn(request, turns)
        )  # decodes leave prefills just their chunk
        in_turn = sorted(self.waiting, key=lambda request: _turn(request, turns))
        self.waiting.clear()
        self.waiting.extend(in_turn)
        way_for = self._next_to_make_way_for(in_turn, turns)
        decodes = 0
        for request in self.running:
            held = external_id(request.request_id) in self.plan.held
            waits = held or _turn(request, turns) > way_for
            request.next_decode_eligible_step = NEVER if waits else 0
            decodes += not held and not _prefilling(request)
        self.max_num_scheduled_tokens = min(
            self.plan.chunk_tokens + decodes, self.scheduler_config.max_num_batched_tokens
        )
        output = super().schedule(throttle_prefills)
        self.prefilled = {
            external_id(request_id): self._prompt_tokens_in_step(request_id, tokens)
            for request_id, tokens in output.num_scheduled_tokens.items()
        }
        self.starved = tuple(sorted(external_id(request_id) for request_id in output.preempted_req_ids or ()))
        return output

    def _next_to_make_way_for(self, waiting: list[Request], turns: Mapping[str, int]) -> float:
        """Return the turn of the next waiting request that may start; infinite if there is none.

        vLLM goes on with the prompts that it has begun before it starts another. So those whose turn comes
        later pause for a step. Way is made for a request once: if there is no memory to start it, nor would
        there be in the next step.
        """
        self._made_way &= {request.request_id for request in waiting}
        if len(self.running) >= self.max_num_active_reqs:
            return math.inf
        for request in waiting:
            held = external_id(request.request_id) in self.plan.held
            if not held and request.request_id not in self._made_way:
                self._made_way.add(request.request_id)
                return _turn(request, turns)
        return math.inf

    def _prompt_tokens_in_step(self, request_id: str, scheduled_tokens: int) -> int:
        request = self.requests[request_id]
        computed: int = request.num_computed_tokens  # schedule() has counted this step's already
        prompt: int = request.num_prompt_tokens
        return max(0, min(computed, prompt) - (computed - scheduled_tokens))

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return whether a waiting request may be started in this step."""
        if external_id(request.request_id) in self.plan.held:
            return False
        return bool(super()._handle_blocked_waiting_request(request))


def _turn(request: Request, turns: Mapping[str, int]) -> int:
    """Return when a request comes: decodes, and what had to leave for want of memory, before all prefills."""
    if request.num_preemptions or not _prefilling(request):
        return -1
    return turns.get(external_id(request.request_id), len(turns))


def _prefilling(request: Request) -> bool:
    """Return whether a request has context left to compute before its next token can be sampled."""
    return bool(request.num_computed_tokens < max(1, request.num_tokens - 1))
