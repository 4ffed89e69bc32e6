"""Streaming clients that know what every answer must be, and what is done to the pool meanwhile."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from support import ROUNDS, RunningPool

CUT_S = 10.0 if ROUNDS > 1 else 4.0
LEASE_S = 5.0


@dataclass
class Outcome:
    """One request: what came of it, through which gateway, and when."""

    model: str
    prompt: int
    gateway: int
    started_s: float
    ended_s: float = 0.0
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    error: str = ""
    broken: bool = False  # the connection to its gateway broke off


class Clients:
    """Clients that stream one answer after the other.

    An emulated answer is a function of its prompt, so a disturbed run must give what an undisturbed one gave.
    """

    def __init__(self, urls: Sequence[str], models: Sequence[str], max_tokens: int = 80) -> None:
        self.urls = list(urls)
        self.models = list(models)
        self.max_tokens = max_tokens
        self.expected: dict[tuple[str, int], str] = {}
        self.outcomes: list[Outcome] = []
        self.turned_away = 0  # by a gateway that is stopping, or not there: asked again, as a client does
        self._http = httpx.AsyncClient(
            trust_env=False, timeout=90.0, limits=httpx.Limits(max_connections=200)
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def learn(self, prompts: int = 8) -> None:
        """Have every answer once, undisturbed."""
        asked = [(model, prompt) for model in self.models for prompt in range(prompts)]
        found = await asyncio.gather(*(self.ask(model, prompt, 0) for model, prompt in asked))
        for key, outcome in zip(asked, found, strict=True):
            assert outcome.done and not outcome.error, outcome
            self.expected[key] = outcome.text

    async def ask(
        self, model: str, prompt: int, gateway: int, traceparent: str = "", max_tokens: int = 0
    ) -> Outcome:
        """Stream one answer."""
        outcome = Outcome(model, prompt, gateway, time.monotonic())
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"Tell me story number {prompt}, please."}],
            "max_tokens": max_tokens or self.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"traceparent": traceparent} if traceparent else {}
        url = self.urls[gateway] + "/v1/chat/completions"
        try:
            async with self._http.stream("POST", url, json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    outcome.error = f"{answer.status_code} {(await answer.aread()).decode()}"
                else:
                    async for line in answer.aiter_lines():
                        _take(outcome, line)
        except httpx.TransportError as error:
            outcome.error, outcome.broken = f"{type(error).__name__}: {error}", True
        if not outcome.error and not outcome.done:
            outcome.error, outcome.broken = "the stream ended without its end mark", True
        outcome.ended_s = time.monotonic()
        return outcome

    async def load(self, clients: int, until: asyncio.Event) -> None:
        """Let `clients` ask one thing after the other, at the gateways in turn, until told to stop."""

        async def one(number: int) -> None:
            prompts = len(self.expected) // len(self.models)
            turn = number
            while not until.is_set():
                model = self.models[turn % len(self.models)]
                outcome = await self.ask(model, turn % prompts, turn % len(self.urls))
                turn += 1
                if outcome.error.startswith(("ConnectError", "503")):
                    self.turned_away += 1
                    await asyncio.sleep(0.2)
                else:
                    self.outcomes.append(outcome)

        await asyncio.gather(*(one(number) for number in range(clients)))

    def wrong(self) -> list[Outcome]:
        """Outcomes that are not exactly the undisturbed answer, those with an error apart."""
        return [
            o
            for o in self.outcomes
            if not o.error and (o.text, o.finish_reasons) != (self.expected[o.model, o.prompt], ["length"])
        ]

    def summary(self) -> str:
        """One line of numbers."""
        attempts = Counter(o.report["attempt"] for o in self.outcomes if not o.error)
        return (
            f"{len(self.outcomes)} requests: {len(self.wrong())} wrong, "
            f"{sum(o.broken for o in self.failed())} broken off, "
            f"{sum(not o.broken for o in self.failed())} failed, {self.turned_away} turned away; "
            f"by attempts: {dict(sorted(attempts.items()))}"
        )

    def failed(self) -> list[Outcome]:
        """Outcomes with an error."""
        return [o for o in self.outcomes if o.error]


def _take(outcome: Outcome, line: str) -> None:
    data = line.removeprefix("data: ")
    if not data:
        return
    assert not outcome.done, f"something follows the end mark: {line}"
    if data == "[DONE]":
        outcome.done = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        outcome.error = str(chunk["error"])
        return
    choice = chunk["choices"][0]
    outcome.text += choice["delta"].get("content") or ""
    if choice["finish_reason"]:
        outcome.finish_reasons.append(choice["finish_reason"])
    outcome.report = chunk.get("festina", outcome.report)


def service_pids(pool: RunningPool) -> dict[str, int]:
    """Id -> process id of every service of the pool."""
    found = {}
    for pid in pool.children():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environ = file.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        found.update({v.removeprefix("FESTINA_ID="): pid for v in environ if v.startswith("FESTINA_ID=")})
    return found


async def kill(pool: RunningPool, ident: str, number: int = signal.SIGKILL) -> float:
    """Signal a service and wait until its supervisor has started it again; returns when it got the signal."""
    pid = await asyncio.to_thread(pool.pid_of, ident)
    os.kill(pid, number)
    died_s = time.monotonic()
    deadline = time.monotonic() + 40
    while (await asyncio.to_thread(service_pids, pool)).get(ident) in (None, pid):
        assert time.monotonic() < deadline, f"{ident} is not started again"
        await asyncio.sleep(0.2)
    return died_s


async def running(url: str) -> int:
    """Requests that run or wait on all GPUs."""
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        gpus = (await http.get(url + "/admin/gpus")).json()["gpus"]
    return sum(engine["running"] + engine["queued"] for gpu in gpus for engine in gpu["engines"])


async def wait_until_idle(url: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while await running(url):
        assert time.monotonic() < deadline, f"GPUs still work after {within_s} s"
        await asyncio.sleep(0.1)


async def gateways_answer(urls: Sequence[str], within_s: float = 30.0) -> None:
    """Wait until every gateway is ready."""
    deadline = time.monotonic() + within_s
    async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
        for url in urls:
            while True:
                with suppress(httpx.TransportError):
                    if (await http.get(url + "/ready")).status_code == 200:
                        break
                assert time.monotonic() < deadline, f"{url} is not ready"
                await asyncio.sleep(0.1)
