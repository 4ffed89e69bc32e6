"""A running pool with two tenants: one floods at ten times its limit, the other's requests all succeed."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from support import RunningPool

from bench.flood import FLOOD_PER_MINUTE, KEYS, QWEN, Result, flood


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPool]:
    folder: Path = tmp_path_factory.mktemp("tenants")
    (folder / "keys.toml").write_text(KEYS.replace("[keys]", '[keys]\nwide-key = "wide"'))
    env = {"FESTINA_GATEWAY_API_KEYS_FILE": str(folder / "keys.toml"), "FESTINA_ADMIN_KEY": "root"}
    flags = ("--emulated", "--models", "2", "--gpus", "1", "--schedulers", "3")
    made = RunningPool(folder, *flags, gateways=2, env=env)
    try:
        made.wait_for_models(QWEN, key="root")
        yield made
    finally:
        made.stop()


def test_a_flood_is_told_to_wait_and_nobody_else_is(pool: RunningPool) -> None:
    result: Result = flood(pool.url, seconds=6.0, times=100.0)
    assert result.steady_statuses == {200: len(result.steady_ttft_ms)}
    assert len(result.steady_ttft_ms) >= 20
    assert set(result.flood_statuses) == {200, 429}
    assert result.flood_statuses[200] == FLOOD_PER_MINUTE
    assert result.flood_statuses[429] >= 5 * FLOOD_PER_MINUTE
    assert all(1 <= seconds <= 61 for seconds in result.flood_retry_after_s)


def test_limits_are_set_while_it_runs(pool: RunningPool) -> None:
    root = {"Authorization": "Bearer root"}
    limits = {"requests_per_minute": 1}
    url = f"{pool.url}/admin/tenants/late"
    assert httpx.put(url, json=limits, headers=root, trust_env=False).status_code == 200
    body = {"model": QWEN, "prompt": "Hi", "max_tokens": 2}
    late = {"Authorization": "Bearer late-key"}
    codes = [
        httpx.post(f"{pool.url}/v1/completions", json=body, headers=late, trust_env=False).status_code
        for _ in range(3)
    ]
    assert codes == [200, 429, 429]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_still_reports_energy(pool: RunningPool, stream: bool) -> None:
    client = openai.OpenAI(base_url=pool.url + "/v1", api_key="steady-key", max_retries=0, timeout=30)
    asked = {"model": QWEN, "prompt": "Once upon a time", "max_tokens": 200}
    text = client.completions.create(**{**asked, "max_tokens": 8}).choices[0].text
    stop = text.split()[3]
    if stream:
        last = list(client.completions.create(**asked, stop=stop, stream=True))[-1]
        report, reason = last.festina, last.choices[0].finish_reason
    else:
        answer = client.completions.create(**asked, stop=stop)
        report, reason = answer.festina, answer.choices[0].finish_reason
    assert reason == "stop" and report["energy_j"] > 0 and "emulated" in report["energy_source"]


def test_a_limit_holds_across_gateways(pool: RunningPool) -> None:
    limits, root = {"requests_per_minute": 10}, {"Authorization": "Bearer root"}
    url = f"{pool.url}/admin/tenants/wide"
    assert httpx.put(url, json=limits, headers=root, trust_env=False).status_code == 200
    urls = [f"{url}/v1/completions" for url in pool.urls]

    def ask(number: int) -> int:
        body = {"model": QWEN, "prompt": "Hi", "max_tokens": 2}
        wide = {"Authorization": "Bearer wide-key"}
        return httpx.post(urls[number % 2], json=body, headers=wide, trust_env=False, timeout=30).status_code

    began_s = time.monotonic()
    assert ask(0) == 200
    time.sleep(3.0)  # the other gateway hears of the new limit
    with ThreadPoolExecutor(8) as threads:
        codes = [200, *threads.map(ask, range(39))]
    regained = int((time.monotonic() - began_s) * 10 / 60)  # a slow machine takes that long
    assert 10 <= codes.count(200) <= 10 + regained and codes.count(200) + codes.count(429) == 40
