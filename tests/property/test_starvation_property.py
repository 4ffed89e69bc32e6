"""Nothing starves on a GPU: for how long a request waits at most, however much comes after it.

A request is passed over for want of memory for `bypass_max_ms` at most; from then on only those start before
it that came before it. So it starts after `bypass_max_ms` and as many stays of the longest-lasting request as
there were requests before it, and two more: those that run when nobody may pass it any more, and a change of
clock or a load on the way.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from test_ledger_property import MODELS, Loop, request

from shared import events as ev

FLOOD_MS = 8_000.0

arrivals = st.lists(
    st.tuples(
        st.floats(5.0, 80.0),  # after the one before it
        st.sampled_from([30, 100, 300, 900]),
        st.integers(5, 60),
        st.integers(0, 1),
    ),
    min_size=10,
    max_size=30,
)


class Waits(Loop):
    """Notes who was before each request when it came, when it started, and how long the longest stayed."""

    def __init__(self, free_tokens: int) -> None:
        super().__init__(free_tokens)
        self.came: dict[str, tuple[float, int]] = {}
        self.started: dict[str, float] = {}
        self.stays: dict[str, float] = {}

    def feed(self, event: ev.Message | ev.Event) -> None:
        super().feed(event)
        if not hasattr(self, "came"):
            return
        works = self.core.state.works
        for request_id, work in works.items():
            if work.given_ms is not None:
                self.started.setdefault(request_id, work.given_ms)
        for request_id in self.started.keys() - works.keys() - self.stays.keys():
            self.stays[request_id] = self.now_ms - self.started[request_id]

    def come(self, number: int, prompt: int, output: int, model: int) -> None:
        request_id = f"r{10_000 - number}"  # so that who comes later has the smaller name
        before = len(self.core.state.works)
        self.submit(request(request_id, MODELS[model].name, prompt, output), output)
        if request_id in self.core.state.works:  # else it is more than ever fits
            self.came[request_id] = (self.now_ms, before)


@settings(max_examples=5, deadline=None)
@given(arrivals, st.sampled_from([1_100, 2_000, 4_000]))
def test_a_request_waits_no_longer_than_for_those_before_it(drawn, free_tokens):
    loop, number = Waits(free_tokens), 0
    until_ms = loop.now_ms + FLOOD_MS
    while loop.now_ms < until_ms:
        after_ms, prompt, output, model = drawn[number % len(drawn)]
        loop.come(number, prompt, output, model)
        loop.run(after_ms)
        number += 1
    loop.settle()
    assert loop.started.keys() == loop.came.keys()
    longest_ms = max(loop.stays.values())
    for request_id, (came_ms, before) in loop.came.items():
        bound_ms = loop.core.state.settings.bypass_max_ms + (before + 2) * longest_ms
        assert loop.started[request_id] - came_ms <= bound_ms
