"""What Prometheus is shown."""

from shared.metrics import Metrics


def lines(metrics: Metrics) -> set[str]:
    return {line for line in metrics.page().decode().splitlines() if not line.startswith("#")}


def test_a_counter_grows_and_a_gauge_is_set_under_the_services_own_labels() -> None:
    metrics = Metrics("migrator", "host-0")
    for value in (1.0, 2.5):
        metrics.count("moves", {"side": "source"}, value)
        metrics.show("power_w", {}, value)
    assert 'festina_moves_total{id="host-0",service="migrator",side="source"} 3.5' in lines(metrics)
    assert 'festina_power_w{id="host-0",service="migrator"} 2.5' in lines(metrics)


def test_a_gauge_by_label_forgets_what_is_no_longer_named() -> None:
    metrics = Metrics("local_sched", "gpu-0")
    metrics.show_each("resident", "model", {"a": 0.0, "b": 1.0})
    metrics.show_each("resident", "model", {"b": 1.0, "c": 0.0})
    own = 'festina_resident{id="gpu-0",model="%s",service="local_sched"} %s'
    assert lines(metrics) == {own % ("b", "1.0"), own % ("c", "0.0")}
    metrics.show_each("resident", "model", {})
    assert lines(metrics) == set()
