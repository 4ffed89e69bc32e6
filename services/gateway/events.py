"""What the gateway's core hears from its own API, and what it tells it."""

from shared.events import STOPPED, Action, Event
from shared.model import ModelSpec, Request, RequestEnd, Tenant

__all__ = [
    "STOPPED",
    "AddModel",
    "Arrived",
    "ClientGone",
    "Deliver",
    "DrainGpu",
    "Fail",
    "RemoveModel",
    "SetTenant",
]


class Arrived(Event):
    """The API has accepted a request; its attempt is 1."""

    request: Request


class ClientGone(Event):
    """The client has left: nobody reads the request any more.

    With the reason `STOPPED` the client has all the text it wants, and waits for nothing but the report.
    """

    request_id: str
    reason: str


class AddModel(Event):
    """Admin adds a model, checked for conflicts already."""

    model: ModelSpec


class RemoveModel(Event):
    """Admin removes a model."""

    name: str


class SetTenant(Event):
    """Admin sets a tenant's limits, checked already."""

    tenant: Tenant


class DrainGpu(Event):
    """Admin wants a GPU to take no new work (`on`), or to take work again."""

    gpu: str
    on: bool


class Deliver(Action):
    """The next output tokens for the client, in order and without gaps; `end` with the last.

    `ttft_ms` counts from the request's arrival, `mean_tbt_ms` is the mean gap after the first token so far.
    `ages_ms`: how long ago the GPU made each, the last of them last; empty: now.
    """

    request_id: str
    token_ids: tuple[int, ...]
    end: RequestEnd | None
    gpu: str
    attempt: int
    ttft_ms: float
    mean_tbt_ms: float
    ages_ms: tuple[float, ...] = ()


class Fail(Action):
    """The request has failed; in HTTP's terms."""

    request_id: str
    status: int
    code: str
    message: str
    retry_after_s: float | None = None
