"""Text to tokens: a model's own tokenizer and chat template, read from its folder.

Reads files, and the date for templates that ask for it. Prompts become the same token ids as in transformers
and vLLM, so an emulated and a real engine are given equal work.
"""

import functools
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.gateway.text import TokenDecoder
from shared import standin
from shared.errors import ConfigError, InvalidRequest

MAX_PROMPT_CHARS = 8_000_000
"""Most characters that a chat template may make of a conversation."""

Message = dict[str, Any]


class ChatTokenizer:
    """Tokenizer and chat template of one model. Safe to use from several threads.

    Attributes:
        eos_ids: tokens that end an output, the tokenizer's own first; may be empty.
        vocab_size: number of token ids, added ones included.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: dict[str, Any], template: str, eos_ids: Sequence[int]
    ) -> None:
        self.eos_ids = tuple(eos_ids)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._tokenizer = tokenizer
        self._template = _environment().from_string(template) if template else None
        self._special_tokens = {
            key: text for key in config if key.endswith("_token") and (text := _token_text(config[key]))
        }
        added = tokenizer.get_added_tokens_decoder()
        self._skip = frozenset(token_id for token_id, token in added.items() if token.special) | {*eos_ids}

    @staticmethod
    def load(path: str) -> "ChatTokenizer":
        """Read a tokenizer folder, or the stand-in tokenizer for ``standin``; each is read once a process.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        return _load(standin.FOLDER if path == "standin" else Path(path))

    def encode_chat(self, messages: list[Message], add_generation_prompt: bool = True) -> list[int]:
        """Return the prompt of a conversation in OpenAI's form; takes a few ms per 1,000 tokens.

        Raises:
            InvalidRequest: 400, the messages are malformed or the model's chat template refuses them.
        """
        if self._template is None:
            raise _refusal("no_chat_template", "this model has no chat template; use /v1/completions instead")
        if not messages:
            raise _refusal("invalid_messages", "messages is empty; give at least one")
        plain = [_plain(i, message) for i, message in enumerate(messages)]
        return self._ids(self._render(self._template, plain, add_generation_prompt), False, "messages")

    def encode(self, text: str) -> list[int]:
        """Return the prompt of a plain completion, with the special tokens that the tokenizer itself adds.

        Raises:
            InvalidRequest: 400, `text` is not valid Unicode.
        """
        return self._ids(text, True, "prompt")

    def decoder(self, prompt_tokens: Sequence[int] = ()) -> TokenDecoder:
        """Return a decoder for one output, which follows `prompt_tokens`; special tokens have no text."""
        return TokenDecoder(self._tokenizer.decode, self._skip, prompt_tokens)

    def _ids(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # how the tokenizer answers half of a surrogate pair, which JSON can carry
            raise _refusal(
                "invalid_text", f"{param} has half a surrogate pair; send Unicode text", param
            ) from None
        return ids

    def _render(self, template: jinja2.Template, messages: list[Message], add_generation_prompt: bool) -> str:
        pieces, chars = [], 0
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            for piece in template.generate(**self._special_tokens, tools=None, documents=None, **values):
                pieces.append(piece)
                chars += len(piece)
                if chars > MAX_PROMPT_CHARS:
                    raise jinja2.TemplateError(f"the prompt has more than {MAX_PROMPT_CHARS} characters")
        except Exception as error:  # a template is a program: odd messages make it fail in any way
            text = f"the model's chat template refuses these messages: {error}"
            raise _refusal("invalid_messages", text) from error
        return "".join(pieces)


def _refusal(code: str, message: str, param: str = "messages") -> InvalidRequest:
    return InvalidRequest(400, code, message, param)


def _plain(index: int, message: Message) -> Message:
    """Return a message with its content as one string; text parts are joined by newlines, as vLLM does."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _refusal("invalid_messages", f"{where} must be an object with a string role", where)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, list):
        raise _refusal("invalid_messages", f"{where}.content must be a string or a list of parts", where)
    return {**message, "content": "\n".join(_part_text(where, part) for part in content)}


def _part_text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise _refusal(
            "unsupported_content", f"{where} has content of type {kind!r}; only text is served", where
        )
    if not isinstance(part.get("text"), str):
        raise _refusal("invalid_messages", f"{where} has a text part without a string text", where)
    text: str = part["text"]
    return text


# ---- reading a folder


@functools.lru_cache(maxsize=64)
def _load(folder: Path) -> ChatTokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ConfigError(
            f"cannot read tokenizer {path}: {error}; give a folder with a tokenizer.json"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    template_path = folder / "chat_template.jinja"
    template = template_path.read_text("utf-8") if template_path.exists() else _template_of(config)
    try:
        return ChatTokenizer(tokenizer, config, template, _eos_ids(folder, tokenizer, config))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"chat template in {folder} is malformed at line {error.lineno}: {error}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _token_text(token: Any) -> str:
    """Return a special token's text; a config has it bare or with its tokenizing options."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _template_of(config: dict[str, Any]) -> str:
    """Return the config's chat template, the one named default where there are several, or nothing."""
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    return str(template)


def _eos_ids(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> list[int]:
    """Return what ends an output: the tokenizer's own token, then the generation config's, as in vLLM."""
    ids = [tokenizer.token_to_id(_token_text(config.get("eos_token")))]
    path = folder / "generation_config.json"
    more = _read_json(path).get("eos_token_id") if path.exists() else None
    ids += more if isinstance(more, list) else [more]
    return [token_id for token_id in dict.fromkeys(ids) if token_id is not None]


# ---- chat templates


class _GenerationTag(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks an assistant's words for training; here it does nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the environment that templates are written for, transformers'.

    A template comes with the weights, from the operator; messages come from anyone and are only ever data to
    it. The sandbox keeps a template from Python's internals, from changing its input, and from long ranges.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[[str], str]] = {"raise_exception": _raise, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without jinja2's escapes for HTML, which a model would read as text."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
