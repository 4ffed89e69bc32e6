"""Request bodies and API keys: what is taken, what is refused, and in which words."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.auth import ApiKeys, digest_of, read_keys
from services.gateway.openai_schema import ChatBody, CompletionBody, parse, sampling_of
from services.gateway.settings import GatewaySettings
from shared.errors import ConfigError, InvalidRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**changes: Any) -> ChatBody:
    return parse(json.dumps({"model": "m", "messages": MESSAGES, **changes}).encode(), ChatBody)


def completion(prompt: Any, **changes: Any) -> CompletionBody:
    return parse(json.dumps({"model": "m", "prompt": prompt, **changes}).encode(), CompletionBody)


def refusal(**changes: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**changes)
    assert caught.value.status == 400
    return caught.value


def test_only_what_the_client_sets_reaches_the_sampler() -> None:
    assert sampling_of(chat(), 0) == {}
    body = chat(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        seed=41,
        logit_bias={"7": -100},
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[3],
        stop="x",
        user="u",
    )
    assert sampling_of(body, 1) == {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
        "seed": 42,
        "logit_bias": {7: -100.0},
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3],
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 17),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a"] * 5),
        ("stop", "a" * 257),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("seed", 1 << 63),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
    ],
)
def test_values_out_of_range_name_their_field(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.param == name and name.split("_")[0] in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("max_tokens", 1.5), ("stream", "yes"), ("stop", 5), ("messages", "hi")],
)
def test_values_of_the_wrong_type_name_their_field(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert (error.code, error.param) == ("invalid_type", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("top_logprobs", 2),
        ("audio", {}),
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert (error.code, error.param) == ("unsupported_parameter", name)


def test_unsupported_parameters_that_ask_for_nothing_are_taken() -> None:
    body = chat(
        tools=None, logprobs=False, response_format={"type": "text"}, n=None, max_tokens=None, stop=None
    )
    assert (body.choices, body.output_limit, body.stops) == (1, None, ())
    assert refusal(best_of=True).param == "best_of"  # True is not 1


def test_unknown_parameters_are_refused_by_name() -> None:
    error = refusal(temprature=1)
    assert (error.code, error.param) == ("unknown_parameter", "temprature")
    assert refusal(stream=True, stream_options={"usage": True}).param == "stream_options"


def test_missing_fields_and_broken_json() -> None:
    assert refusal(model=None).param == "model"
    for data in (b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 5000):
        with pytest.raises(InvalidRequest) as caught:
            parse(data, ChatBody)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    with pytest.raises(InvalidRequest) as caught:
        parse(b'{"model": "m"}', CompletionBody)
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", "prompt")


def test_messages() -> None:
    assert refusal(messages=[{"role": "tool", "content": "x"}]).code == "unsupported_parameter"
    assert refusal(messages=[{"role": "assistant", "tool_calls": [{}]}]).param == "messages[0].tool_calls"
    assert refusal(messages=[{"role": "boss", "content": "x"}]).param == "messages[0].role"
    assert chat(messages=[{"role": "assistant", "content": "x", "tool_calls": None}])


def test_the_newer_name_of_the_output_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).output_limit == 7
    assert chat(max_tokens=5).output_limit == 5
    assert refusal(max_tokens=5, min_tokens=6).param == "min_tokens"


def test_one_prompt() -> None:
    assert completion("a").single_prompt == "a"
    assert completion(["a"]).single_prompt == "a"
    assert completion([1, 2]).single_prompt == (1, 2)
    assert completion([[1]]).single_prompt == (1,)
    assert completion("a", echo=False, best_of=1).single_prompt == "a"
    for several in (["a", "b"], [[1], [2]], [1, "a"], [-1], [True], [1.5]):
        with pytest.raises(InvalidRequest) as caught:
            assert completion(several).single_prompt
        assert caught.value.param == "prompt"


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys]\n"sha256:{digest_of("k1").upper()}" = "a"\n"k2" = "b"\n')
    keys = ApiKeys(read_keys(str(path)))
    assert keys.tenant_of("Bearer k1") == "a" and keys.tenant_of("bearer k2") == "b"
    keys.set_stored({digest_of("k2"): "other", digest_of("k3"): "c"})
    assert keys.tenant_of("Bearer k2") == "b" and keys.tenant_of("Bearer k3") == "c"
    keys.set_stored({})
    for header in (None, "", "Bearer", "Bearer  ", "Bearer k3", "Basic k1", f"Bearer {digest_of('k1')}"):
        with pytest.raises(InvalidRequest) as caught:
            keys.tenant_of(header)
        assert caught.value.status == 401


@pytest.mark.parametrize(
    "text", ["", "[keys]\n", "[keys]\nk = 1\n", '[keys]\n"sha256:12" = "a"\n', "x", "k = 1"]
)
def test_malformed_key_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        read_keys(str(path))


def test_without_keys_everybody_is_the_default_tenant() -> None:
    assert ApiKeys().tenant_of(None) == "default"
    ApiKeys().require_admin(None)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_attempts"):
        GatewaySettings(max_attempts=0)
    with pytest.raises(ConfigError, match="bus_grace_ms"):
        GatewaySettings(bus_grace_ms=-1.0)
    assert GatewaySettings(port=0, bus_grace_ms=0.0).port == 0
