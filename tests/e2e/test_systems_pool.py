"""Every system by its name, live: an emulated pool that serves under it answers chat completions."""

import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support import RunningPool

from shared.systems import SYSTEMS

QWEN = "Qwen2.5-7B-Instruct"
DEFAULT = "festina-pdd", "aegaeon"  # models or phases apart: what no other pool test has
ASKED = tuple(SYSTEMS) if os.environ.get("FESTINA_EVERY_SYSTEM") else DEFAULT  # `make test-systems`: all


@pytest.fixture(params=ASKED)
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPool]:
    flags = ("--emulated", "--gpus", "4", "--models", "2", "--system", request.param)
    made = RunningPool(tmp_path_factory.mktemp("pool"), *flags)
    try:
        made.wait_for_models(QWEN)
        yield made
    finally:
        made.stop()


def test_it_answers(pool: RunningPool) -> None:
    client = openai.OpenAI(base_url=pool.url + "/v1", api_key="unused", max_retries=0, timeout=60)
    models = [model.id for model in client.models.list()]
    assert len(models) == 2
    for model in models * 2:
        hello: Any = [{"role": "user", "content": f"Hello, {model}."}]
        answer = client.chat.completions.create(model=model, messages=hello, max_tokens=12)
        assert answer.usage is not None and answer.usage.completion_tokens == 12
        [choice] = answer.choices
        assert choice.finish_reason == "length" and len((choice.message.content or "").split()) == 12
