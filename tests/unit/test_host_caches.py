"""Which hosts have which weights in memory."""

from shared.catalog import emulated_models
from shared.events import HostWeights
from shared.model import digest
from shared.weights import FORGOTTEN_AFTER_MS, WEIGHTS_BEAT_MS, HostCaches

MODEL, OTHER = emulated_models(2)


def heard(caches: HostCaches, now_ms: float, host: str, *models) -> None:
    caches.hear(now_ms, HostWeights(host=host, specs=tuple(digest(model) for model in models)))


def test_a_host_is_asked_for_what_it_told_last():
    caches = HostCaches()
    heard(caches, 0.0, "h1", MODEL, OTHER)
    heard(caches, 1.0, "h2", OTHER)
    assert caches.hosts(2.0, OTHER) == {"h1", "h2"}
    heard(caches, 3.0, "h1", MODEL)
    assert caches.hosts(4.0, OTHER) == {"h2"} and caches.source(4.0, "h1", MODEL) == "host"


def test_a_silent_host_is_not_counted_on_whoever_else_speaks():
    caches = HostCaches()
    heard(caches, 0.0, "h1", MODEL)
    assert caches.hosts(FORGOTTEN_AFTER_MS - 1.0, MODEL) == {"h1"}
    assert caches.hosts(FORGOTTEN_AFTER_MS, MODEL) == set()


def test_hosts_that_come_and_go_are_not_remembered_for_ever():
    caches = HostCaches()
    for number in range(100):
        heard(caches, number * WEIGHTS_BEAT_MS, "stays", MODEL)
        heard(caches, number * WEIGHTS_BEAT_MS, f"passes-{number}", MODEL)
    assert len(caches) == 1 + FORGOTTEN_AFTER_MS / WEIGHTS_BEAT_MS
    assert "stays" in caches.hosts(100 * WEIGHTS_BEAT_MS, MODEL)
