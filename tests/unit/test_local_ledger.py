"""Memory ledger and availability staircase."""

from services.local_sched.ledger import Ledger, staircase
from shared.model import ModelSpec


def spec(name, weight_bytes, kv_bytes_per_token=10):
    return ModelSpec(
        name=name,
        engine="emulated",
        params=1,
        layers=1,
        hidden=1,
        heads=1,
        kv_heads=1,
        head_dim=1,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
    )


def test_elastic_pools_share_what_is_free():
    ledger = Ledger(10_000)
    assert ledger.open(spec("a", 3_000), 0, 16)
    assert ledger.open(spec("b", 4_000), 0, 16)
    assert not ledger.open(spec("c", 3_001), 0, 16)
    assert ledger.free_bytes == 3_000
    assert ledger.reserve("a", "r1", 17)  # two blocks of 160 bytes
    assert ledger.free_bytes == 2_680
    assert ledger.free_kv_bytes("b") == 2_680
    assert ledger.most_kv_bytes("b") == 3_000
    assert ledger.domain("a") == ["a", "b"]


def test_a_reservation_grows_and_never_shrinks():
    ledger = Ledger(1_000)
    ledger.open(spec("a", 0), 0, 16)
    assert ledger.reserve("a", "r", 32)
    assert ledger.reserve("a", "r", 1)
    assert ledger.held_tokens("a", "r") == 32
    assert not ledger.reserve("a", "r", 16 * 7)  # 1,120 bytes in all
    assert ledger.held_tokens("a", "r") == 32
    ledger.release("a", "r")
    ledger.release("a", "r")
    assert ledger.free_bytes == 1_000


def test_a_fixed_pool_is_its_own_domain():
    ledger = Ledger(10_000)
    assert ledger.open(spec("a", 1_000), 2_000, 16)
    assert ledger.open(spec("b", 1_000), 0, 16)
    assert ledger.free_bytes == 6_000
    assert ledger.reserve("a", "r", 192)  # twelve blocks: 1,920 of 2,000
    assert ledger.free_bytes == 6_000
    assert ledger.free_kv_bytes("a") == 80
    assert not ledger.reserve("a", "q", 16)
    assert ledger.domain("a") == ["a"] and ledger.domain("b") == ["b"]


def test_an_engine_with_other_blocks_keeps_what_was_promised_before_it_was_ready():
    ledger = Ledger(10_000)
    assert ledger.open(spec("a", 1_000), 2_000, 16)
    assert ledger.reserve("a", "move:1", 40)  # three blocks of 16
    ledger.resize("a", 1_920, 32)
    assert ledger.held_tokens("a", "move:1") == 64
    assert ledger.free_kv_bytes("a") == 1_920 - 640


def test_a_move_hands_its_promise_to_the_request():
    ledger = Ledger(1_000)
    ledger.open(spec("a", 0), 0, 16)
    ledger.reserve("a", "move:1", 32)
    ledger.rename("a", "move:1", "r")
    assert ledger.held_tokens("a", "r") == 32 and ledger.free_bytes == 680


def test_staircase_adds_up_what_ends():
    steps = staircase(100, 40, [(50.0, 20, 60), (10.0, 5, 0)])
    assert [(s.after_ms, s.free_bytes, s.free_sm_share_pct) for s in steps] == [
        (0.0, 100, 40),
        (10.0, 105, 40),
        (50.0, 125, 100),
    ]


def test_waiting_requests_take_what_comes_free_first():
    steps = staircase(10, 0, [(5.0, 30, 10)], claimed_bytes=25)
    assert [s.free_bytes for s in steps] == [0, 15]


def test_staircase_has_at_most_eight_steps_and_ends_where_all_is_free():
    steps = staircase(0, 0, [(float(i), 1, 1) for i in range(1, 101)])
    assert len(steps) == 8
    assert steps[-1].after_ms == 100.0 and steps[-1].free_bytes == 100 and steps[-1].free_sm_share_pct == 100
    assert all(step.free_bytes == step.after_ms for step in steps)
