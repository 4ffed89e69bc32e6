"""One request on one GPU, and what an engine's requests add up to."""

from enum import Enum
from typing import NamedTuple

from shared.model import Request

GROWTH_TOKENS = 64
"""A request that outgrows its reservation asks for this much more at a time, if that fits."""


class Arrival(NamedTuple):
    """What a request finds in a stage when its next run begins: the KV of `kv_tokens` tokens of its context.

    It has brought that along by a move, which `migrator` drives; or its model has lost the turn
    (`switching.py`); or it was evicted, and its engine keeps the KV in a stage of its own.
    """

    stage: str
    kv_tokens: int
    move_id: str = ""
    migrator: str = ""

    @property
    def own_stage(self) -> bool:
        """Whether the stage is its engine's own."""
        return not self.move_id


class Stage(Enum):
    """Where a request is: waiting in the queue, given to its engine, or held still, out of it, for a move."""

    QUEUED = "queued"
    RUNNING = "running"
    HELD = "held"


class Work:
    """One attempt on this GPU.

    Args:
        request: as it would be given to an engine; rewritten with the tokens so far when it leaves one.
        arrived_ms: when it came to this GPU.
        runnable_ms: since when it waits: its arrival, or its last eviction.
        due_ms: deadline of the first token of its present run.
        prefill_ms: profiled time of its prefill, for Eq. 4.
        tokens: output since `request` was last rewritten.
        prefilled_tokens: prompt tokens computed in its present run.
        run_id: what its engine calls its present run.
        run_first_ms, run_tokens: first token of its present run, None before, and their number.
        given_ms, first_ms, last_ms: start of its first run, and its first and latest token here.
        passed_over_ms: since when it is passed over for want of memory.
        urgent: it outgrew its reservation and goes first (3.4, mispredictions).
        dispatch: the rule by which the global scheduler chose this GPU; empty after a move.
        hand_to: (GPU, host) where it is to go on after its first token; None: here.
        arrival: KV that lies in a stage for it, and that its engine has not said to have taken yet.
    """

    prefilled_tokens: int = 0
    run_id: str = ""
    run_first_ms: float | None = None
    run_tokens: int = 0
    given_ms: float | None = None
    first_ms: float | None = None
    last_ms: float | None = None
    passed_over_ms: float | None = None
    urgent: bool = False
    dispatch: str = ""
    hand_to: tuple[str, str] | None = None
    arrival: Arrival | None = None
    _terms: tuple[int, int, int, float] = (0, 0, 0, 0.0)
    _terms_of: Request | None = None

    def __init__(
        self,
        request: Request,
        predicted_output_tokens: int,
        arrived_ms: float,
        runnable_ms: float,
        due_ms: float,
        prefill_ms: float,
        energy_j: float | None,
    ) -> None:
        self.request, self.predicted_output_tokens = request, predicted_output_tokens
        self.arrived_ms, self.runnable_ms, self.due_ms = arrived_ms, runnable_ms, due_ms
        self.prefill_ms, self.energy_j = prefill_ms, energy_j
        self.stage = Stage.QUEUED
        self.tokens: list[int] = []

    @property
    def terms(self) -> tuple[int, int, int, float]:
        """Of its request, kept at hand: tokens of the prompt, of the output, at most of that; TBT in ms."""
        request = self.request
        if self._terms_of is not request:
            prompt, output = len(request.prompt_tokens), len(request.output_tokens)
            self._terms = (prompt, output, request.max_tokens, request.objectives.tbt_ms)
            self._terms_of = request
        return self._terms

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        prompt, output, _, _ = self.terms
        return prompt + output + len(self.tokens)

    @property
    def output_count(self) -> int:
        """Output tokens so far, earlier attempts included: the index of the next one."""
        return self.terms[1] + len(self.tokens)

    @property
    def decoding(self) -> bool:
        """Whether its present run has made a token."""
        return self.run_first_ms is not None

    @property
    def started(self) -> bool:
        """Whether it has made a token, in whichever run, attempt or place."""
        return self.output_count > 0

    @property
    def prefill_tokens(self) -> int:
        """Tokens still to be computed before its present run makes one."""
        prompt, output, _, _ = self.terms
        return max(1, prompt + output - self.prefilled_tokens)

    @property
    def remaining_tokens(self) -> int:
        """Output tokens still expected, at least one."""
        return max(1, min(self.request.max_tokens, self.predicted_output_tokens) - self.output_count)

    @property
    def wanted_tokens(self) -> int:
        """Tokens to reserve KV for: prompt and predicted output, which has its margin already (3.2.2).

        One that has outgrown its prediction gets `GROWTH_TOKENS` more, not to do so at once again.
        """
        output = self.predicted_output_tokens
        if output <= self.output_count:
            output = self.output_count + GROWTH_TOKENS
        return len(self.request.prompt_tokens) + min(self.request.max_tokens, output)


class Tally(NamedTuple):
    """What runs in an engine, counted up.

    Args:
        decodes: requests that decode.
        context_tokens, steps: tokens of their contexts, and steps until they end, added up.
        tbt_ms: the shortest of their TBTs.
        left_ms: at least this long after the last step was each one's next token due, by its mean TBT.
        last_ms: when the last step ended.
        prefills: the others, as they came.
    """

    decodes: int
    context_tokens: int
    steps: int
    tbt_ms: float
    left_ms: float
    last_ms: float
    prefills: list[Work]

    def stepped(self, now_ms: float, steps: int) -> "Tally":
        """Return what it is after more steps in which all decodes got on, and nothing else."""
        return Tally(
            self.decodes,
            self.context_tokens + steps * self.decodes,
            max(self.decodes, self.steps - steps * self.decodes),
            self.tbt_ms,
            self.left_ms + steps * self.tbt_ms - (now_ms - self.last_ms),
            now_ms,
            self.prefills,
        )


class Inside(NamedTuple):
    """What runs in an engine, as the summary tells of it.

    Args:
        context_tokens: of all contexts.
        tbt_ms: the shortest TBT; infinite if nothing runs.
        prefills: (when it is due, tokens) of each that has given no token yet.
        ends: (ms from now, bytes, 0) that each request is expected to free, the first of them first.
    """

    context_tokens: int
    tbt_ms: float
    prefills: list[tuple[float, int]]
    ends: list[tuple[float, int, int]]
