"""OpenAI's request bodies: what is taken, what is refused and in which words.

A field is taken, refused by name (``unsupported_parameter``) or unknown (``unknown_parameter``): nothing is
ever ignored that would change the answer. Sampling parameters that the client leaves out are left to the
engine, so its own defaults hold.
"""

import re
from typing import Any, TypeVar

import msgspec

from shared.errors import InvalidRequest
from shared.model import Struct

MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_CHOICES = 16
MAX_LISTED = 1024  # entries of logit_bias and stop_token_ids

_SAMPLING = (  # name, least, most; the least of top_p and repetition_penalty is excluded
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, 1 << 31),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 2.0),
    ("seed", -(1 << 63), (1 << 63) - 1),
    ("min_tokens", 0, 1 << 31),
)
_EXCLUDES_LEAST = frozenset({"top_p", "repetition_penalty"})

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # name: values that ask for nothing, beside null
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
_CHAT_ROLES = ("system", "developer", "user", "assistant")
_MESSAGE_FIELDS = frozenset({"role", "content", "name"})
_AT = re.compile(r"`\$\.?(.*?)`$")


class StreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream is to be sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of completion take. `user` and `safety_identifier` are taken and not used."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    user: str | None = None
    safety_identifier: str | None = None

    @property
    def choices(self) -> int:
        """Number of answers asked for."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def output_limit(self) -> int | None:
        """Most output tokens, None if the client leaves it open."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatBody(Body, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None

    @property
    def output_limit(self) -> int | None:
        """Most output tokens; `max_completion_tokens` is the newer name and wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Body, kw_only=True):
    """Body of ``POST /v1/completions``; one prompt, as text or as token ids."""

    prompt: str | list[Any]

    @property
    def single_prompt(self) -> str | tuple[int, ...]:
        """The one prompt. Raises InvalidRequest if there are several or it is malformed."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise invalid("prompt", "one prompt a request is served; send the others on their own")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        if not all(type(token_id) is int and token_id >= 0 for token_id in prompt):
            raise invalid("prompt", "prompt must be a string or a list of token ids")
        return tuple(prompt)


B = TypeVar("B", bound=Body)
_DECODERS: dict[type[Body], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatBody, CompletionBody)
}


def invalid(param: str | None, message: str, code: str = "invalid_value") -> InvalidRequest:
    """Return the 400 for a malformed field."""
    return InvalidRequest(400, code, message, param)


def parse(data: bytes, kind: type[B]) -> B:
    """Decode and check a request body. Raises InvalidRequest naming the field at fault."""
    try:
        body: B = _DECODERS[kind].decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        body = _parse_slowly(data, kind, str(error))
    _check_ranges(body)
    _check_stops(body)
    _check_lists(body)
    if isinstance(body, ChatBody):
        _check_messages(body.messages)
    return body


def sampling_of(body: Body, choice: int) -> dict[str, Any]:
    """Return what the engine's sampler takes, by vLLM's names; only what the client has set."""
    sampling: dict[str, Any] = {
        name: value for name, _, _ in _SAMPLING if (value := getattr(body, name)) is not None
    }
    if body.seed is not None:
        sampling["seed"] = body.seed + choice
    if body.ignore_eos is not None:
        sampling["ignore_eos"] = body.ignore_eos
    if body.stop_token_ids:
        sampling["stop_token_ids"] = list(body.stop_token_ids)
    if body.logit_bias:
        sampling["logit_bias"] = {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    return sampling


def _parse_slowly(data: bytes, kind: type[B], reason: str) -> B:
    """Find out which field is at fault; drop the unsupported ones that ask for nothing, and try again."""
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest(400, "invalid_json", f"the body is not valid JSON: {reason}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(400, "invalid_json", "the body must be a JSON object")
    known = {field.name for field in msgspec.structs.fields(kind)}
    for name in sorted(fields.keys() - known):
        if name not in _UNSUPPORTED:
            text = f"unknown parameter: {name!r}; remove it"
            raise InvalidRequest(400, "unknown_parameter", text, name)
        value = fields.pop(name)
        neutral = _UNSUPPORTED[name]
        if value is not None and not any(value == each and type(value) is type(each) for each in neutral):
            raise InvalidRequest(400, "unsupported_parameter", f"{name!r} is not supported; remove it", name)
    for name in ("model", "messages" if kind is ChatBody else "prompt"):
        if fields.get(name) is None:
            raise invalid(name, f"{name!r} is required", "missing_required_parameter")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        text, _, place = str(error).rpartition(" - at ")
        found = _AT.match(place)
        param = found.group(1) if found else None
        where = f"{param}: " if param else ""
        raise invalid(param, where + (text or str(error)), "invalid_type") from None


def _check_ranges(body: Body) -> None:
    for name, least, most in _SAMPLING:
        value = getattr(body, name)
        if value is None:
            continue
        if not least <= value <= most or (value == least and name in _EXCLUDES_LEAST):
            low = f"above {least}" if name in _EXCLUDES_LEAST else f"at least {least}"
            raise invalid(name, f"{name} must be {low} and at most {most}, not {value}")
    if not 1 <= body.choices <= MAX_CHOICES:
        raise invalid("n", f"n must be from 1 to {MAX_CHOICES}, not {body.n}")
    if body.seed is not None and body.seed + body.choices > 1 << 63:
        raise invalid("seed", f"seed {body.seed} leaves no room for {body.choices} choices")
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, name, None)
        if value is not None and value < 1:
            raise invalid(name, f"{name} must be at least 1, not {value}")
    limit = body.output_limit
    if body.min_tokens and limit is not None and body.min_tokens > limit:
        raise invalid("min_tokens", f"min_tokens {body.min_tokens} is more than the output limit {limit}")
    if body.priority is not None and not -(1 << 31) <= body.priority < 1 << 31:
        raise invalid("priority", "priority must fit in 32 bits")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only for stream: true")


def _check_stops(body: Body) -> None:
    if len(body.stops) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} stop strings are taken, not {len(body.stops)}")
    if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in body.stops):
        raise invalid("stop", f"a stop string must have 1 to {MAX_STOP_CHARS} characters")


def _check_lists(body: Body) -> None:
    for name in ("logit_bias", "stop_token_ids"):
        value = getattr(body, name)
        if value is not None and len(value) > MAX_LISTED:
            raise invalid(name, f"{name} has more than {MAX_LISTED} entries")
    for token_id, bias in (body.logit_bias or {}).items():
        if not (token_id.isascii() and token_id.isdigit()):
            raise invalid("logit_bias", f"logit_bias takes token ids as keys, not {token_id!r}")
        if not -100.0 <= bias <= 100.0:
            raise invalid("logit_bias", f"a logit bias must be from -100 to 100, not {bias}")
    if body.stop_token_ids and min(body.stop_token_ids) < 0:
        raise invalid("stop_token_ids", "stop_token_ids must not be negative")


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        raise invalid("messages", "messages is empty; give at least one")
    for i, message in enumerate(messages):
        for name in message.keys() - _MESSAGE_FIELDS:
            if message[name] is not None:
                where = f"messages[{i}].{name}"
                raise InvalidRequest(400, "unsupported_parameter", f"{where} is not supported", where)
        role = message.get("role")
        if role in ("tool", "function"):
            where = f"messages[{i}].role"
            raise InvalidRequest(400, "unsupported_parameter", f"{where} {role!r} is not supported", where)
        if role not in _CHAT_ROLES:
            text = f"messages[{i}].role must be one of {', '.join(_CHAT_ROLES)}, not {role!r}"
            raise invalid(f"messages[{i}].role", text)
