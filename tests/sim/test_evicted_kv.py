"""Short of memory, with and without host memory for the KV of requests that are evicted."""

import pytest
from msgspec.structs import replace

from shared.slabs import SlabPool
from sim.scenario import Result, Scenario
from sim.wild import scenario
from sim.world import run

SEED = 0  # of the soak: one GPU, memory for about four of its requests, most outputs underestimated


def short_of_memory(offload_bytes: int) -> Scenario:
    found = scenario(SEED)
    assert found.device is not None and found.models[0].kv_bytes_per_token < 1_000_000
    slab_bytes = 8 << 20  # three blocks
    local = replace(found.settings.local, offload_bytes=offload_bytes, offload_slab_bytes=slab_bytes)
    return replace(found, faults=(), settings=replace(found.settings, local=local))


@pytest.fixture(scope="module")
def lost() -> list[float]:
    """Fragmentation of the host memory that is taken, as it was whenever some more was."""
    return []


@pytest.fixture(scope="module")
def results(lost: list[float]) -> tuple[Result, Result]:
    with pytest.MonkeyPatch.context() as patch:
        right = SlabPool.hold

        def noted(self: SlabPool, name: str, block_bytes: int, blocks: int) -> str:
            reason = right(self, name, block_bytes, blocks)
            lost.append(self.fragmentation)
            return reason

        patch.setattr(SlabPool, "hold", noted)
        kept = run(short_of_memory(32 << 30), check=True)
    return kept, run(short_of_memory(0), check=True)


def test_who_was_evicted_comes_back_with_its_kv_and_answers_the_same(results: tuple[Result, Result]) -> None:
    kept, computed = results
    evictions = kept.counters["local_sched.evictions"]
    assert evictions >= 5 and kept.counters["local_sched.offloads.kept"] >= 0.8 * evictions
    assert kept.counters["local_sched.offload_imports.taken"] == kept.counters["local_sched.offloads.kept"]
    assert "local_sched.offloads.kept" not in computed.counters and computed.counters["local_sched.evictions"]
    for result in results:
        finished = [r for r in result.requests if r.outcome == "stop"]
        assert len(finished) > 50 and all(r.output_tokens == r.expected_tokens for r in finished)


@pytest.mark.usefixtures("results")
def test_less_than_a_fifth_of_the_host_memory_is_lost(lost: list[float]) -> None:
    assert 0.0 < max(lost) < 0.2
