"""Tokens to text, a few at a time: incremental decoding and stop strings.

Pure. The gateway alone turns tokens into text, so a stream outlives the engine that began it: whoever makes
the next token, the same `TextStream` takes it.
"""

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"
# A character has at most four bytes. Cut short it decodes to at most three replacement characters (one for
# byte-level tokenizers, one per byte for those that fall back to bytes), which later tokens may yet change.
_UNSETTLED_CHARS = 3
# Most tokens decoded together; reached only by text that ends in replacement characters at every token.
_WINDOW_TOKENS = 64


class TokenDecoder:
    """Decodes one output token by token; joined, the pieces are what decoding it all at once gives.

    A window of the last tokens is decoded anew at each step, since a token's text may depend on its
    neighbours: characters span tokens, and some tokenizers drop the space before the very first word.

    Args:
        decode: text of a list of token ids, incomplete characters as U+FFFD.
        skip: ids that have no text, such as the end of a turn.
        prompt_tokens: what the output follows. Its last tokens only tell whether the first word of the
            output has a space before it; their text is not given out.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skip: Collection[int] = frozenset(),
        prompt_tokens: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._skip = skip
        self._window = self._context(prompt_tokens)
        self._given = decode(self._window)  # of the window's text, what was given out
        self._settled = len(self._window)  # tokens of the window whose text was given out in full

    def step(self, token_id: int) -> str:
        """Take the next token; return the text that has become certain. A few microseconds."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        unsettled = 0
        if text.endswith(REPLACEMENT):
            unsettled = min(len(text) - len(text.rstrip(REPLACEMENT)), _UNSETTLED_CHARS)
        full = len(self._window) >= _WINDOW_TOKENS
        if unsettled and not full and not text[:-unsettled].startswith(self._given):
            # With byte fallback, a whole run of bytes decodes as broken until its last character is complete.
            return ""
        new = self._beyond_given(text, unsettled)
        if new and not unsettled:
            self._slide(self._settled, 0)
            self._settled = len(self._window)
        elif full:
            self._slide(len(self._window) - _UNSETTLED_CHARS - 1, unsettled)
            self._settled = 0
        return new

    def finish(self) -> str:
        """Return what is left: the beginning of a character that never came, as U+FFFD."""
        return self._beyond_given(self._decode(self._window), 0)

    def _beyond_given(self, text: str, unsettled: int) -> str:
        """Count the window's text but its last `unsettled` characters as given out; return the new part."""
        if text.startswith(self._given):
            beyond = text[len(self._given) :]
        else:  # a broken byte has turned characters before it, already given out, into replacements
            beyond = self._decode(self._window[self._settled :])
        self._given = text[: len(text) - unsettled]
        return beyond[: max(len(beyond) - unsettled, 0)]

    def _slide(self, first: int, unsettled: int) -> None:
        """Drop the tokens before `first`; the last `unsettled` characters remain to be given out."""
        self._window = self._window[first:]
        text = self._decode(self._window)
        self._given = text[: len(text) - unsettled]

    def _context(self, prompt_tokens: Sequence[int]) -> list[int]:
        """Return the fewest last tokens of the prompt that have whole text, or none."""
        tail = [token_id for token_id in prompt_tokens[-8:] if token_id not in self._skip]
        for first in range(len(tail) - 1, -1, -1):
            text = self._decode(tail[first:])
            if text and REPLACEMENT not in text:
                return tail[first:]
        return []


class _StopMatcher:
    """Finds one stop string in text that comes a character at a time (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # length of the longest beginning of `stop` that the text so far ends with
        self._fallback = [0] * len(stop)  # [i]: the same for stop[: i + 1], itself left out
        for i in range(1, len(stop)):
            self._fallback[i] = self._advance(self._fallback[i - 1], stop[i])

    def feed(self, char: str) -> bool:
        """Take the next character; return whether the text now ends with the stop string."""
        self.matched = self._advance(self.matched, char)
        return self.matched == len(self.stop)

    def _advance(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + (self.stop[matched] == char)


class TextStream:
    """The text of one choice, as far as it may be sent: cut at the first stop string, characters whole.

    First is the stop string that ends first, whatever the borders of tokens; of two that end together, the
    one listed first. Text that may be the beginning of a stop string is held back until that is decided.

    Args:
        decoder: decoder of this choice's tokens.
        stop: stop strings, none of them empty; their number and length are bounded by the caller.
        include_stop: send the stop string as well.

    Attributes:
        stopped: the stop string that ended the text; None while there is none.
        tokens_seen: tokens taken, up to and including the one that completed the stop string.
    """

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        assert all(stop), "an empty stop string would match everywhere; refuse it before"
        self.stopped: str | None = None
        self.tokens_seen = 0
        self._decoder = decoder
        self._include_stop = include_stop
        self._matchers = [_StopMatcher(text) for text in stop]
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return new text that may be sent; after a stop they are ignored."""
        sendable = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.tokens_seen += 1
            sendable.append(self._release(self._decoder.step(token_id)))
        return "".join(sendable)

    def finish(self) -> str:
        """Return the text still held back, now that no token follows; empty after a stop."""
        if self.stopped is not None:
            return ""
        text = self._release(self._decoder.finish()) + self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        """Search new text for stop strings; return what of it and of the held text may be sent."""
        if not self._matchers or not new:
            return new
        text = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            # Every matcher takes the character before one may end the text, so the order is the list's.
            hits = [matcher for matcher in self._matchers if matcher.feed(char)]
            if hits:
                self.stopped = hits[0].stop
                self._held = ""
                return text[: end if self._include_stop else end - len(self.stopped)]
        safe = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[safe:]
        return text[:safe]
