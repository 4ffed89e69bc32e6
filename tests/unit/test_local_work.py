"""One request on one GPU."""

from msgspec.structs import replace

from services.local_sched.work import Work
from shared.model import Request
from shared.slo import objectives_for

REQUEST = Request(
    request_id="r",
    attempt=1,
    gateway="g",
    model="m",
    prompt_tokens=(1, 2, 3),
    max_tokens=50,
    objectives=objectives_for(3),
)


def test_what_is_kept_at_hand_is_of_the_request_as_it_is_now():
    work = Work(REQUEST, 20, 0.0, 0.0, 1000.0, 10.0, None)
    assert work.terms == (3, 0, 50, REQUEST.objectives.tbt_ms)
    work.request = replace(REQUEST, output_tokens=(7, 8))
    assert work.terms == (3, 2, 50, REQUEST.objectives.tbt_ms)
