"""What each model was asked for lately: rate, lengths, latency over a sliding window (3.5.2, phase one)."""

from collections import deque
from dataclasses import dataclass

from shared.events import RequestEnded

BUCKETS = 30  # of the window; what is older than it goes bucket by bucket
RECENT = 6  # buckets over which the present rate is taken


@dataclass(frozen=True, slots=True)
class Load:
    """Mean load of one model.

    Args:
        rate_per_s: requests per second over the window, or over its latest fifth if that is more: a plan
            must not count on a rise being over.
        input_tokens, output_tokens: mean lengths of a request.
        latency_ms: mean time from its arrival to its last token.
    """

    rate_per_s: float
    input_tokens: float
    output_tokens: float
    latency_ms: float


@dataclass(slots=True)
class _Bucket:
    """Sums over the requests that ended within one part of the window."""

    index: int
    count: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    latency_ms: float = 0.0


class Windows:
    """The sliding windows of all models.

    Args:
        span_ms: length of the window (3.5.2: 5 minutes).
    """

    def __init__(self, span_ms: float) -> None:
        self._bucket_ms = span_ms / BUCKETS
        self._buckets: dict[str, deque[_Bucket]] = {}
        self._since_ms: float | None = None

    def heard_ms(self, now_ms: float) -> float:
        """Return for how long there has been anything to hear; at most that much is known."""
        return 0.0 if self._since_ms is None else now_ms - self._since_ms

    def listen(self, now_ms: float) -> None:
        """From here on, what is not heard has not happened."""
        self._since_ms = now_ms if self._since_ms is None else self._since_ms

    def restart(self, now_ms: float) -> None:
        """What happened before may have been missed: count anew."""
        self._since_ms = now_ms
        self._buckets.clear()

    def note(self, now_ms: float, ended: RequestEnded) -> None:
        """Count a request that has ended with at least one token."""
        if not ended.output_tokens:
            return
        buckets = self._buckets.setdefault(ended.model, deque())
        index = int(now_ms // self._bucket_ms)
        if not buckets or buckets[-1].index != index:
            buckets.append(_Bucket(index))
            self._drop_old(buckets, index)
        last = buckets[-1]
        last.count += 1
        last.input_tokens += ended.input_tokens
        last.output_tokens += ended.output_tokens
        last.latency_ms += ended.ttft_ms + ended.mean_tbt_ms * (ended.output_tokens - 1)

    def load(self, now_ms: float, model: str) -> Load | None:
        """Return a model's load; None if nothing of it ended within the window."""
        buckets = self._buckets.get(model)
        if buckets is None or self._since_ms is None:
            return None
        index = int(now_ms // self._bucket_ms)
        self._drop_old(buckets, index)
        count = sum(bucket.count for bucket in buckets)
        if not count:
            del self._buckets[model]
            return None
        recent = sum(bucket.count for bucket in buckets if bucket.index > index - RECENT)
        rates = (self._rate_per_s(now_ms, count, BUCKETS), self._rate_per_s(now_ms, recent, RECENT))
        return Load(
            rate_per_s=max(rates),
            input_tokens=sum(bucket.input_tokens for bucket in buckets) / count,
            output_tokens=sum(bucket.output_tokens for bucket in buckets) / count,
            latency_ms=sum(bucket.latency_ms for bucket in buckets) / count,
        )

    def forget(self, model: str) -> None:
        """Drop what is known of a model that is gone."""
        self._buckets.pop(model, None)

    def _rate_per_s(self, now_ms: float, count: int, buckets: int) -> float:
        """Requests per second over so many buckets, the present one as far as it has come."""
        span_ms = now_ms % self._bucket_ms + (buckets - 1) * self._bucket_ms
        return 1000.0 * count / max(self._bucket_ms, min(span_ms, self.heard_ms(now_ms)))

    def _drop_old(self, buckets: deque[_Bucket], index: int) -> None:
        while buckets and buckets[0].index <= index - BUCKETS:
            buckets.popleft()
