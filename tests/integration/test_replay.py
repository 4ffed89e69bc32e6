"""What live services recorded, fresh cores do again, action for action."""

from pathlib import Path

import httpx
import pytest
from support import RunningPool

from shared.catalog import emulated_models
from sim.replay import Differs, replay

MODEL = emulated_models(2)[0].name


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    env = {"FESTINA_RECORD": str(folder / "rec"), "FESTINA_LOCAL_SCHED_PACING": "slack"}
    pool = RunningPool(folder, "--emulated", "--gpus", "2", "--models", "2", env=env)
    try:
        pool.wait_for_models(MODEL)
        for tokens in (1, 5, 40):
            body = {"model": MODEL, "prompt": "the light of day", "max_tokens": tokens, "stream": tokens > 1}
            answer = httpx.post(pool.url + "/v1/completions", json=body, timeout=60, trust_env=False)
            assert answer.status_code == 200, answer.text
        answer = httpx.post(
            pool.url + "/v1/completions", json={"model": "nobody", "prompt": "x"}, trust_env=False
        )
        assert answer.status_code == 404
    finally:
        pool.stop()
    return folder / "rec"


def test_every_service_does_again_what_it_did(recordings: Path) -> None:
    steps = {path.name.partition(".")[0]: 0 for path in recordings.glob("*.rec")}
    assert set(steps) >= {"gateway", "global_sched", "local_sched", "consolidator"}
    for path in sorted(recordings.glob("*.rec")):
        steps[path.name.partition(".")[0]] += replay(path)
    assert all(count > 10 for name, count in steps.items() if name != "migrator"), steps


def test_another_core_is_found_out(recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.local_sched import plans

    monkeypatch.setattr(plans.tune, "largest_chunk", lambda *at: 64)
    path = max(recordings.glob("local_sched.*.rec"), key=lambda found: found.stat().st_size)
    with pytest.raises(Differs, match="SetPlan"):
        replay(path)
