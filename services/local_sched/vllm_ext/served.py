"""One model in vLLM: takes orders, makes steps, and says what each did."""

import hashlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from services.local_sched.vllm_ext.kv import KvPort
from services.local_sched.vllm_ext.scheduler import PlanScheduler
from services.local_sched.vllm_ext.sleep import Sleeper
from services.local_sched.vllm_ext.sms import SmStreams
from services.local_sched.vllm_ext.wire import EngineOrder, EngineReport, SmCut, UseSms
from shared.engine import (
    EngineAsleep,
    EngineReady,
    ExportKv,
    FreeStage,
    LoadEngine,
    OutOfMemory,
    RunRequest,
    SetPlan,
    SleepEngine,
    StepDone,
    StepOutput,
    StopRequest,
    WakeEngine,
)
from shared.errors import FestinaError
from shared.model import ModelSpec, Request

BLOCK_TOKENS = 32
DEFAULT_KV_POOL_BYTES = 256 << 20
MAX_RUNNING = 256
"""As many as a local scheduler gives an engine (its `max_running`): which of them run, only the plan says."""

MAX_STEP_TOKENS = 2048


class ServedModel:
    """A vLLM engine in this process, for one model.

    Args:
        load: the order to load it.
        stages: folder of the host's stages; None: KV is not moved.
        sms: parts of the SMs to compute on by turns; None: always all that the process has.
    """

    def __init__(self, load: LoadEngine, stages: Path | None = None, sms: SmCut | None = None) -> None:
        # On hosts with AMX, a process whose first step has a single token dies of an illegal instruction in
        # CPU attention unless it has asked the kernel for the tile registers before.
        torch.cpu._init_amx()
        self._spec = load.model
        self._stages = stages
        self._started_s = 0.0
        self._salt_key = secrets.token_bytes(32)  # no other process has to know a salt again
        self._engine = LLMEngine.from_engine_args(engine_args(load.model, load.kv_pool_bytes))
        scheduler = self._engine.engine_core.engine_core.scheduler
        assert isinstance(scheduler, PlanScheduler)
        self._scheduler = scheduler
        self._layers = self._engine.vllm_config.compilation_config.static_forward_context
        self._kv = KvPort(load.model, scheduler, self._layers, stages)
        self._sleeper = Sleeper(self._engine, self._kv.caches)
        self._sms = _streams(sms) if sms else None
        self._warm_up()

    @property
    def _model(self) -> str:
        return self._spec.name

    def _warm_up(self) -> None:
        """Make a step with a prompt, and one that decodes: the first of a process take many times as long."""
        params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
        self._engine.add_request("warm-up", TokensPrompt(prompt_token_ids=[0] * BLOCK_TOKENS), params)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def ready(self, load_ms: float) -> EngineReady:
        """Report that the model is loaded; the pool is what requests can use of it, in whole blocks."""
        config = self._scheduler.kv_cache_config
        block_bytes = sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
        return EngineReady(
            model=self._model,
            kv_pool_bytes=(config.num_blocks - 1) * block_bytes,  # vLLM keeps one block for itself
            block_tokens=self._scheduler.block_size,
            load_ms=load_ms,
        )

    def wait_s(self) -> float | None:
        """Return how long the next step is to wait by the plan; None while there is nothing to do."""
        if not self.has_runnable():
            return None
        interval_s = self._scheduler.plan.step_interval_ms / 1000
        if not interval_s or self._scheduler.has_prefills():
            return 0.0
        return max(0.0, self._started_s + interval_s - time.perf_counter())

    def has_runnable(self) -> bool:
        """Return whether the plan in force leaves anything to do."""
        return self._scheduler.has_runnable()

    def obey(self, order: EngineOrder) -> Iterator[EngineReport]:
        """Carry out an order; yields the end of a request that vLLM refuses."""
        match order:
            case RunRequest(request=request):
                yield from self._run(request)
                if order.stage:
                    yield self._kv.take(order)
            case ExportKv():
                yield self._kv.export(order)
            case FreeStage(stage=stage):
                self._kv.free(stage)
            case StopRequest(request_id=request_id):
                self._engine.abort_request([request_id])
            case SetPlan(plan=plan):
                self._scheduler.plan = plan
            case UseSms(first=first, units=units):
                if self._sms is not None:
                    self._sms.use(first, units)
            case SleepEngine(level=level):
                yield self._sleep(level)
            case WakeEngine(serve=serve):
                yield self._wake(serve)
            case LoadEngine():
                raise AssertionError("an engine process serves one model")

    def _sleep(self, level: int) -> EngineAsleep:
        """Sleep, unless there are requests, and say at which level it is."""
        started, freed_bytes, reason = time.perf_counter(), 0, ""
        try:
            self._check_idle()
            freed_bytes = self._sleeper.sleep(level)
            self._kv.free_all()
        except FestinaError as error:
            reason = str(error)
        took_ms = (time.perf_counter() - started) * 1000
        return EngineAsleep(self._model, self._sleeper.level, freed_bytes, took_ms, reason)

    def _wake(self, serve: ModelSpec) -> EngineReady | EngineAsleep:
        """Serve a model from now on, or say why not."""
        started = time.perf_counter()
        try:
            self._check_idle()
            self._sleeper.wake(self._spec, serve)
        except FestinaError as error:
            return EngineAsleep(self._model, self._sleeper.level, reason=str(error))
        if serve.weights != self._spec.weights:
            self._kv = KvPort(serve, self._scheduler, self._layers, self._stages)
        self._spec = serve
        return self.ready((time.perf_counter() - started) * 1000)

    def _check_idle(self) -> None:
        """Raise FestinaError while there are requests."""
        if count := len(self._scheduler.requests):
            raise FestinaError(f"it has {count} requests")

    def _run(self, request: Request) -> Iterator[StepDone]:
        try:
            prompt = TokensPrompt(
                prompt_token_ids=[*request.prompt_tokens, *request.output_tokens],
                cache_salt=cache_salt(self._salt_key, request.tenant),
            )
            self._engine.add_request(request.request_id, prompt, sampling_params(request))
        except (
            Exception
        ) as error:  # vLLM's validation raises errors of many types; each concerns this request only
            self._engine.abort_request([request.request_id])
            refused = StepOutput(request_id=request.request_id, finish_reason="error", error=str(error))
            yield StepDone(
                model=self._model, plan_id=self._scheduler.plan.plan_id, duration_ms=0.0, outputs=(refused,)
            )

    def step(self) -> Iterator[EngineReport]:
        """Make one step under the plan in force; yields nothing if it found nothing to run."""
        self._started_s = started = time.perf_counter()
        ended = {output.request_id: output for output in self._engine.step()}
        duration_ms = (time.perf_counter() - started) * 1000
        for request_id in self._scheduler.starved:
            yield OutOfMemory(model=self._model, request_id=request_id)
        prefilled = self._scheduler.prefilled
        outputs = tuple(
            step_output(request_id, prefilled.get(request_id, 0), ended.get(request_id))
            for request_id in prefilled | ended
        )
        if outputs:
            yield StepDone(
                model=self._model,
                plan_id=self._scheduler.plan.plan_id,
                duration_ms=duration_ms,
                outputs=outputs,
            )


def _streams(cut: SmCut) -> SmStreams:
    """Make the streams of the parts; only where there is CUDA are its bindings installed."""
    from services.local_sched.vllm_ext.cuda_sms import CudaSms

    return SmStreams(cut, CudaSms())


def engine_args(model: ModelSpec, kv_pool_bytes: int) -> EngineArgs:
    """Return vLLM's arguments for serving `model` on a CPU with a fixed pool of KV blocks."""
    return EngineArgs(
        model=model.weights,
        # "auto" would halve fp32 weights, and the books with them; which it is to be, the specification says
        dtype="float32" if model.weight_bytes >= 4 * model.params else "auto",
        max_model_len=model.context_tokens,
        kv_cache_memory_bytes=kv_pool_bytes or DEFAULT_KV_POOL_BYTES,
        block_size=BLOCK_TOKENS,
        max_num_seqs=MAX_RUNNING,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        scheduler_cls=PlanScheduler,
        async_scheduling=False,  # or a step is scheduled before the plan for it has come
        distributed_executor_backend="uni",  # no worker process: this process is the worker
        enforce_eager=True,  # a captured graph runs on the SMs that it was captured on
        enable_sleep_mode=not current_platform.is_cpu(),
        enable_prefix_caching=False,  # the books of memory count what each request computes for itself
        disable_log_stats=True,
    )


def cache_salt(key: bytes, tenant: str) -> str:
    """Return the salt of a tenant's prefixes: no other tenant's requests find them, nor tell by their time.

    A keyed hash: who sees salts learns neither the tenant's name nor whether it is a name he can guess.
    """
    return hashlib.blake2b(tenant.encode(), key=key, digest_size=16).hexdigest()


def sampling_params(request: Request) -> SamplingParams:
    """Return a request's sampling, less what earlier attempts have generated of it.

    Text is the gateway's business, hence no detokenizing here. Raises whatever vLLM raises for a name or a
    value that it does not take.
    """
    given = dict(request.sampling)
    done = len(request.output_tokens)
    if "min_tokens" in given:
        given["min_tokens"] = max(0, given["min_tokens"] - done)
    return SamplingParams(
        **given,
        max_tokens=request.max_tokens - done,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def step_output(request_id: str, prefilled_tokens: int, output: RequestOutput | None) -> StepOutput:
    """Return what a step did for one request; `output` is None where it sampled no token."""
    if output is None:
        return StepOutput(request_id=request_id, prefilled_tokens=prefilled_tokens)
    completion = output.outputs[0]
    reason = completion.finish_reason or ""
    refused = reason not in ("", "stop", "length")
    return StepOutput(
        request_id=request_id,
        token_ids=tuple(completion.token_ids),
        prefilled_tokens=prefilled_tokens,
        finish_reason="error" if refused else reason,
        error=f"vLLM ended the request: {reason}" if refused else "",
    )
