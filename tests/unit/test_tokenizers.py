"""Prompts to token ids: the stand-in, folders of real models, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.gateway.tokenizers import ChatTokenizer
from shared import standin
from shared.errors import ConfigError, InvalidRequest

SMOLLM2 = Path(__file__).parents[2] / ".festina" / "models" / "smollm2-135m-instruct"
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load("standin")


def folder_with(tmp_path: Path, **changes: Any) -> str:
    """A copy of the stand-in's folder whose config is changed; None removes a key."""
    shutil.copy(standin.FOLDER / "tokenizer.json", tmp_path)
    config = json.loads((standin.FOLDER / "tokenizer_config.json").read_text())
    config = {key: value for key, value in (config | changes).items() if value is not None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(tmp_path)


def text_of(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    """Text of the ids, special tokens included."""
    return str(tokenizer._tokenizer.decode(ids, skip_special_tokens=False))


def refusal(tokenizer: ChatTokenizer, messages: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode_chat(messages)
    assert caught.value.status == 400
    return caught.value


# ---- the stand-in


def test_standin_chat_prompt(tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    ids = tokenizer.encode_chat(messages)
    assert text_of(tokenizer, ids) == turns + "<|im_start|>assistant\n"
    assert text_of(tokenizer, tokenizer.encode_chat(messages, add_generation_prompt=False)) == turns
    assert ids[0] == 1 and ids.count(2) == 2  # markers are one token each


def test_standin_attributes(tokenizer: ChatTokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (4096, (2,))
    assert ChatTokenizer.load("standin") is tokenizer


def test_standin_round_trip(tokenizer: ChatTokenizer) -> None:
    text = "Plain words, naïve café, 日本語 😀\n\ttabs  and   spaces; x = {'a': [1, 2.5]}"
    decoder = tokenizer.decoder()
    assert "".join(map(decoder.step, tokenizer.encode(text))) == text


def test_special_tokens_have_no_text(tokenizer: ChatTokenizer) -> None:
    decoder = tokenizer.decoder()
    assert "".join(map(decoder.step, tokenizer.encode("a<|im_end|>b"))) == "ab"


def test_vocab_slice_reads_like_words(tokenizer: ChatTokenizer) -> None:
    ids, eos_id = standin.vocab_slice()
    assert len(ids) == len(set(ids)) == 500
    assert (eos_id,) == tokenizer.eos_ids
    decoder = tokenizer.decoder()
    words = [decoder.step(token_id) for token_id in ids]
    assert all(word[0] == " " and word[1:].isalpha() and word.islower() for word in words)
    assert {" the", " a", " and", " of"} <= set(words)


def test_standin_files_are_small() -> None:
    assert (standin.FOLDER / "tokenizer.json").stat().st_size < 300_000


# ---- messages


def test_text_parts_are_joined_and_null_content_is_empty(tokenizer: ChatTokenizer) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    joined = tokenizer.encode_chat([{"role": "user", "content": "Hello\nthere"}])
    assert tokenizer.encode_chat([{"role": "user", "content": parts}]) == joined
    assert "<|im_start|>user\n<|im_end|>" in text_of(
        tokenizer, tokenizer.encode_chat([{"role": "user", "content": None}])
    )


def test_other_parts_are_refused_by_name(tokenizer: ChatTokenizer) -> None:
    error = refusal(tokenizer, [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert (error.code, error.param) == ("unsupported_content", "messages[1]")
    assert "image_url" in error.message


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["Hello"],
        [{"content": "Hello"}],
        [{"role": 3, "content": "Hello"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_malformed_messages_are_refused(tokenizer: ChatTokenizer, messages: Any) -> None:
    assert refusal(tokenizer, messages).code == "invalid_messages"


def test_half_surrogate_pair_is_refused(tokenizer: ChatTokenizer) -> None:
    error = refusal(tokenizer, [{"role": "user", "content": "a\ud83d"}])
    assert (error.code, error.param) == ("invalid_text", "messages")
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud83d")


# ---- templates


def test_template_sees_what_transformers_gives(tmp_path: Path) -> None:
    template = """{%- for m in messages %}
    {% generation %}
{{ m | tojson }}
    {% endgeneration %}
  {% if loop.first %}{% break %}{% endif %}
{% endfor %}
{{ eos_token }}{{ bos_token }}{{ tools is none }}{{ strftime_now("%Y") | length }}"""
    eos = {"content": "<|im_end|>", "lstrip": False}
    path = folder_with(tmp_path, chat_template=template, eos_token=eos, bos_token=None)
    loaded = ChatTokenizer.load(path)
    content = [{"role": "user", "content": "<é>"}] * 2
    text = text_of(loaded, loaded.encode_chat(content))
    assert text == '{"role": "user", "content": "<é>"}\n<|im_end|>True4'


def test_template_file_wins_over_config(tmp_path: Path) -> None:
    path = folder_with(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    loaded = ChatTokenizer.load(path)
    assert text_of(loaded, loaded.encode_chat(USER)) == "Hello!"


def test_default_of_several_templates(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    loaded = ChatTokenizer.load(folder_with(tmp_path, chat_template=templates))
    assert text_of(loaded, loaded.encode_chat(USER)) == "plain"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ messages.append(1) }}", "append"),
        ("{% for i in range(10**9) %}{% endfor %}", "ange too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "8000000 characters"),
    ],
)
def test_template_failures_are_refusals(tmp_path: Path, template: str, says: str) -> None:
    loaded = ChatTokenizer.load(folder_with(tmp_path, chat_template=template))
    error = refusal(loaded, USER)
    assert error.code == "invalid_messages"
    assert says in error.message


def test_model_without_template(tmp_path: Path) -> None:
    loaded = ChatTokenizer.load(folder_with(tmp_path, chat_template=None))
    error = refusal(loaded, USER)
    assert error.code == "no_chat_template"
    assert "/v1/completions" in error.message


# ---- folders


def test_end_tokens_of_both_configs(tmp_path: Path) -> None:
    path = folder_with(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2, 300]}')
    loaded = ChatTokenizer.load(path)
    assert loaded.eos_ids == (2, 0, 300)
    assert loaded.decoder().step(300) == ""


def test_completion_gets_the_tokenizers_own_special_tokens(tmp_path: Path) -> None:
    path = folder_with(tmp_path)
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text())
    first = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    data["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    file.write_text(json.dumps(data))
    loaded = ChatTokenizer.load(path)
    assert text_of(loaded, loaded.encode("Hello there")) == "<|im_start|>Hello there"  # and not truncated
    assert loaded.encode_chat(USER).count(1) == 2  # the template's own, none added


def test_unreadable_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.tokenizer\.json"):
        ChatTokenizer.load(str(tmp_path / "nowhere"))
    folder_with(tmp_path, chat_template="{% if %}")
    with pytest.raises(ConfigError, match="malformed at line 1"):
        ChatTokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json must hold a JSON object"):
        ChatTokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer_config\.json"):
        ChatTokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot read tokenizer"):
        ChatTokenizer.load(str(tmp_path))


# ---- a real model


@pytest.mark.skipif(not (SMOLLM2 / "tokenizer.json").exists(), reason=f"no converted model at {SMOLLM2}")
def test_smollm2_prompt_is_that_of_transformers() -> None:
    loaded = ChatTokenizer.load(str(SMOLLM2))
    assert (loaded.vocab_size, loaded.eos_ids) == (49152, (2,))
    # From transformers 5.19: apply_chat_template([{"role": "user", "content": "Hello, naïve 😀"}]).
    # fmt: off
    expected = [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
        19712, 8182, 2, 198, 1, 4093, 198, 19556, 28, 15486, 46494, 40303, 218, 2, 198, 1, 520, 9531, 198,
    ]
    # fmt: on
    assert loaded.encode_chat([{"role": "user", "content": "Hello, naïve 😀"}]) == expected
    decoder = loaded.decoder()
    assert "".join(map(decoder.step, loaded.encode("Hello, naïve 😀"))) == "Hello, naïve 😀"
