"""Incremental decoding and stop strings, on tokens small enough to follow by eye."""

import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.gateway.text import TextStream, TokenDecoder
from services.gateway.tokenizers import ChatTokenizer


def stream(*tokens: str | bytes, stop: tuple[str, ...] = (), include_stop: bool = False) -> TextStream:
    data = [token.encode() if isinstance(token, str) else token for token in tokens]

    def decode(ids: list[int]) -> str:
        return b"".join(data[i] for i in ids).decode("utf-8", "replace")

    return TextStream(TokenDecoder(decode, skip={99}), stop, include_stop)


def test_text_passes_at_once_without_stop_strings() -> None:
    s = stream("Hel", "lo", " world")
    assert [s.push([0]), s.push([1, 2]), s.finish()] == ["Hel", "lo world", ""]
    assert (s.stopped, s.tokens_seen) == (None, 3)


def test_incomplete_character_waits_for_its_last_byte() -> None:
    s = stream(b"a\xf0\x9f", b"\x98", b"\x80b")
    assert [s.push([0]), s.push([1]), s.push([2])] == ["a", "", "😀b"]


def test_character_that_never_completes_is_a_replacement_at_the_end() -> None:
    s = stream("a", b"\xe2\x82")
    assert [s.push([0, 1]), s.finish(), s.finish()] == ["a", "\ufffd", ""]


def test_skipped_tokens_have_no_text_but_count() -> None:
    s = stream("a", "b")
    assert [s.push([99, 0, 99]), s.push([99, 1])] == ["a", "b"]
    assert s.tokens_seen == 5


def test_beginning_of_a_stop_string_is_held_until_it_fails() -> None:
    s = stream("x<", "/", "y", stop=("</s>",))
    assert [s.push([0]), s.push([1]), s.push([2])] == ["x", "", "</y"]
    assert s.stopped is None


def test_held_text_is_sent_at_the_end() -> None:
    s = stream("x</s", stop=("</s>",))
    assert [s.push([0]), s.finish(), s.finish()] == ["x", "</s", ""]


@pytest.mark.parametrize(("include_stop", "text"), [(False, "x"), (True, "x</s>")])
def test_stop_string_across_tokens(include_stop: bool, text: str) -> None:
    s = stream("x<", "/s", ">tail", "more", stop=("</s>",), include_stop=include_stop)
    assert s.push([0]) + s.push([1]) + s.push([2, 3]) + s.push([3]) + s.finish() == text
    assert (s.stopped, s.tokens_seen) == ("</s>", 3)


def test_stop_string_of_many_bytes_across_a_character() -> None:
    s = stream(b"a\xe2", b"\x82", b"\xac!", b"z", stop=("€!",))
    assert s.push([0, 1, 2, 3]) + s.finish() == "a"
    assert (s.stopped, s.tokens_seen) == ("€!", 3)


def test_near_miss_inside_a_match_is_not_lost() -> None:
    s = stream("aa", "ab", stop=("aab",))
    assert s.push([0]) + s.push([1]) == "a"
    assert s.stopped == "aab"


@pytest.mark.parametrize(
    ("stop", "stopped", "text"),
    [
        (("abcd", "bc"), "bc", "a"),  # bc ends first
        (("bc", "abc"), "bc", "a"),  # both end together: the one listed first
        (("abc", "bc"), "abc", ""),
    ],
)
def test_first_stop_string_is_the_one_that_ends_first(stop: tuple[str, ...], stopped: str, text: str) -> None:
    s = stream("abcd", stop=stop)
    assert s.push([0]) + s.finish() == text
    assert s.stopped == stopped


def test_stop_string_completed_only_by_the_end() -> None:
    s = stream(b"a\xff", stop=("\ufffd",))
    assert s.push([0]) + s.finish() == "a"
    assert s.stopped == "\ufffd"


def test_empty_stop_string_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="empty"):
        stream(stop=("",))


def sentencepiece() -> Tokenizer:
    """A tokenizer of Llama 2's kind: marks spaces with U+2581, falls back to bytes, drops the first space."""
    words = ["▁Hello", "▁world", "lo", "▁"]
    vocab = {text: i for i, text in enumerate([*words, *(f"<0x{i:02X}>" for i in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces_of(ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    tokenizer = sentencepiece()
    decoder = TokenDecoder(tokenizer.decode, skip={EOS}, prompt_tokens=prompt)
    return [*(decoder.step(i) for i in ids), decoder.finish()]


HELLO, WORLD, LO, SPACE, FIRST_BYTE = 0, 1, 2, 3, 4
EOS = 4 + 256


def byte_ids(data: bytes) -> list[int]:
    return [FIRST_BYTE + value for value in data]


def test_prefix_space_is_dropped_only_at_the_very_start() -> None:
    assert pieces_of([HELLO, WORLD, SPACE, LO]) == ["Hello", " world", " ", "lo", ""]


def test_prefix_space_after_a_prompt_is_kept() -> None:
    assert pieces_of([WORLD], prompt=(HELLO,)) == [" world", ""]
    assert pieces_of([WORLD], prompt=(HELLO, EOS)) == [" world", ""]
    assert pieces_of([WORLD], prompt=(EOS,)) == ["world", ""]


def test_prompt_that_ends_inside_a_character_is_no_context() -> None:
    assert pieces_of([LO], prompt=tuple(byte_ids("€".encode()[:2]))) == ["lo", ""]


def test_byte_fallback_characters_come_whole() -> None:
    assert pieces_of([HELLO, *byte_ids("é😀".encode()), LO]) == [
        "Hello", "", "é", "", "", "", "😀", "lo", "",
    ]  # fmt: skip
    long = "日本語のテキスト" * 20
    assert "".join(pieces_of(byte_ids(long.encode()))) == long


def test_broken_byte_fallback_loses_nothing_after_it() -> None:
    assert "".join(pieces_of(byte_ids("é".encode() + b"\xff"))) == "é\ufffd"
    assert "".join(pieces_of([*byte_ids("é".encode() + b"\xff"), LO, WORLD])) == "é\ufffdlo world"
    assert "".join(pieces_of([*byte_ids("é".encode() + b"\xff" * 90), LO])) == "é" + "\ufffd" * 90 + "lo"


def test_long_broken_output_stays_bounded() -> None:
    ids = byte_ids(b"\xff") * 2000
    started_s = time.process_time()
    pieces = pieces_of(ids)
    assert "".join(pieces) == "\ufffd" * 2000
    # Decoding all 2,000 anew at each step would take over ten times as long.
    assert time.process_time() - started_s < 0.5


def test_push_takes_microseconds() -> None:
    tokenizer = ChatTokenizer.load("standin")
    ids = tokenizer.encode("A sentence of ordinary words, with a stop that never comes. " * 100)
    s = TextStream(tokenizer.decoder(), ("\n\nUser:", "###", "</s>", "END"))
    started_s = time.process_time()
    text = "".join(s.push([token_id]) for token_id in ids)
    push_us = (time.process_time() - started_s) / len(ids) * 1e6
    assert text.startswith("A sentence of ordinary words")
    print(f"{push_us:.1f} us per token")
    assert push_us < 100  # some 5 us on an idle machine
