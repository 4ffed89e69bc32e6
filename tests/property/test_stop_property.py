"""TextStream against brute force: decode everything, cut at the first stop string."""

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.text import REPLACEMENT, TextStream, TokenDecoder
from services.gateway.tokenizers import ChatTokenizer

ALPHABET = "ab é€😀"  # one to four bytes each, few enough that stop strings hit and nearly hit often


def stream_of(tokens: list[bytes], stop: list[str], include_stop: bool = False) -> TextStream:
    """A stream whose token ids are indices into `tokens`, decoded as byte-level tokenizers do."""

    def decode(ids: list[int]) -> str:
        return b"".join(tokens[i] for i in ids).decode("utf-8", "replace")

    return TextStream(TokenDecoder(decode), stop, include_stop)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders) if a < b]


def first_stop(text: str, stop: list[str]) -> tuple[int, str] | None:
    """End and string of the stop string that ends first, the earlier listed first."""
    ends = [(text.find(s) + len(s), i, s) for i, s in enumerate(stop) if s in text]
    return (min(ends)[0], min(ends)[2]) if ends else None


@settings(max_examples=400, deadline=None)
@given(
    st.text(ALPHABET, max_size=40),
    st.lists(st.integers(0, 200), max_size=40),
    st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4),
    st.booleans(),
    st.integers(1, 5),
)
@example("aab", [1, 2], ["ab"], False, 1)
@example("ab", [1], ["b", "ab"], False, 1)
def test_cut_at_first_stop(
    text: str, cuts: list[int], stop: list[str], include_stop: bool, per_push: int
) -> None:
    tokens = split(text.encode(), cuts)
    found = first_stop(text, stop)
    expected, stopped, seen = text, None, len(tokens)
    if found:
        end, stopped = found
        expected = text[: end if include_stop else end - len(stopped)]
        through = len(text[:end].encode())
        seen = next(n for n in range(len(tokens) + 1) if len(b"".join(tokens[:n])) >= through)

    stream = stream_of(tokens, stop, include_stop)
    sent = ""
    for start in range(0, len(tokens), per_push):
        sent += stream.push(range(start, min(start + per_push, len(tokens))))
        assert expected.startswith(sent)  # nothing sent is ever taken back or past the cut
        known = b"".join(tokens[: start + per_push]).decode("utf-8", "ignore")
        held = known[len(sent) :]
        if stream.stopped is None:  # only what may begin a stop string is held back
            assert not held or any(s.startswith(held) for s in stop)
    assert sent + stream.finish() == expected
    assert (stream.stopped, stream.tokens_seen) == (stopped, seen)
    assert stream.finish() == "" and (not stopped or stream.push([0]) == "")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=3), max_size=90))
@example([b"\xff"] * 90 + [b"\xf0", b"\x9f\x98", b"\x80"])
@example([b"a\xf0\x9f"] + [b"\x98\x80\xf0\x9f"] * 80 + [b"\x98"])
@example([b"\xf0\x9f\x98"] * 70 + [b"\x80a"])
def test_any_bytes_decode_as_a_whole(tokens: list[bytes]) -> None:
    stream = stream_of(tokens, [])
    whole = b"".join(tokens).decode("utf-8", "replace")
    sent = ""
    for i in range(len(tokens)):
        sent += stream.push([i])
        assert whole.startswith(sent)
        behind = len(b"".join(tokens[: i + 1]).decode("utf-8", "replace")) - len(sent)
        assert behind <= 3  # never more than one incomplete character's worth is held back
    assert sent + stream.finish() == whole


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4095), max_size=40), st.integers(0, 30), st.integers(1, 3))
def test_standin_ids_with_a_stop_taken_from_the_text(ids: list[int], at: int, length: int) -> None:
    tokenizer = ChatTokenizer.load("standin")
    plain = TextStream(tokenizer.decoder())
    text = plain.push(ids) + plain.finish()
    stop = text[at : at + length]
    if not stop or REPLACEMENT in stop:
        return
    stream = TextStream(tokenizer.decoder(), [stop])
    pushed = "".join(stream.push([token_id]) for token_id in ids)
    assert pushed + stream.finish() == text[: text.index(stop)]
    assert stream.stopped == stop and stream.tokens_seen <= len(ids)
