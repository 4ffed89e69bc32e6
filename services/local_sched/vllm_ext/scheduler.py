"""vLLM's scheduler, made to obey a standing plan: who may run, and how much prompt a step may compute (3.4).

Holding a request keeps its KV; what it goes on to write is what it would have written without the hold. The
hooks used here are private to vLLM, so only tested versions of it are accepted (`version.py`).
"""

import math
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from shared.model import Plan

NEVER = 1 << 62
"""A scheduler step that no engine reaches."""


def external_id(request_id: str) -> str:
    """Return the id a request was given to vLLM under; vLLM appends a dash and eight random characters."""
    return request_id.rsplit("-", 1)[0]


class PlanScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not there to be type-checked against
    """Runs the requests that the plan does not hold: decodes, then prefills in the order of the plan.

    After each `schedule`, `prefilled` says how many prompt tokens the step computes for each request in it
    (0 for a decode), and `starved` which requests have begun to wait for KV blocks. They keep what they have:
    vLLM would preempt one and compute its context again, but whom to evict is for the local scheduler to say.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan = Plan(plan_id=0)
        self._made_way: set[str] = set()
        self.prefilled: dict[str, int] = {}
        self.starved: tuple[str, ...] = ()
        self._short: set[str] = set()

    def is_held(self, request: Request) -> bool:
        """Return whether the plan holds a request."""
        return external_id(request.request_id) in self.plan.held

    def has_runnable(self) -> bool:
        """Return whether a step may find something to do; if not, the caller waits for an order."""
        return self.has_finished_requests() or any(
            not self.is_held(request) and (self.plan.chunk_tokens > 0 or not _prefilling(request))
            for request in self.requests.values()
        )

    def has_prefills(self) -> bool:
        """Return whether there is a prompt to compute that the plan lets run."""
        return self.plan.chunk_tokens > 0 and any(
            _prefilling(request) and not self.is_held(request) for request in self.requests.values()
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
        free = [request for request in self.running if not self.is_held(request)]
        runs, short = self._divide([request for request in free if _turn(request, turns) <= way_for])
        for request in self.running:
            request.next_decode_eligible_step = 0 if request.request_id in runs else NEVER
        decodes = sum(not _prefilling(request) for request in runs.values())
        self.max_num_scheduled_tokens = min(
            self.plan.chunk_tokens + decodes, self.scheduler_config.max_num_batched_tokens
        )
        output = super().schedule(throttle_prefills)
        self.prefilled = {
            external_id(request_id): self._prompt_tokens_in_step(request_id, tokens)
            for request_id, tokens in output.num_scheduled_tokens.items()
        }
        self.starved = tuple(sorted(external_id(request_id) for request_id in short - self._short))
        self._short = short
        return output

    def _divide(self, requests: list[Request]) -> tuple[dict[str, Request], set[str]]:
        """Return those that there are KV blocks for, the earlier ones first, and the ids of the others."""
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        chunk_tokens = self.plan.chunk_tokens
        runs: dict[str, Request] = {}
        short: set[str] = set()
        for request in requests:
            tokens = 1
            if _prefilling(request):
                tokens = min(chunk_tokens, request.num_tokens - request.num_computed_tokens)
                chunk_tokens -= tokens
            (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
            needed = -(-(request.num_computed_tokens + tokens) // self.block_size) - len(blocks)
            if needed > free:
                short.add(request.request_id)
            else:
                runs[request.request_id] = request
                free -= max(0, needed)
        return runs, short

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
            held = self.is_held(request)
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
        if self.is_held(request):
            return False
        return bool(super()._handle_blocked_waiting_request(request))


def _turn(request: Request, turns: Mapping[str, int]) -> int:
    """Return when a request comes: decodes, and what had to leave for want of memory, before all prefills."""
    if request.num_preemptions or not _prefilling(request):
        return -1
    return turns.get(external_id(request.request_id), len(turns))


def _prefilling(request: Request) -> bool:
    """Return whether a request has prompt left to compute, or is computing anew what it had."""
    return bool(request.num_computed_tokens < max(request.num_prompt_tokens, request.num_tokens - 1))
