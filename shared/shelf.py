"""The look-up tables that a scheduler decides by: a stored one if there is one, else a modelled one (3.2)."""

from collections.abc import Callable

from shared.lut import Lut
from shared.model import ModelSpec


class Shelf:
    """Tables by GPU type and model.

    Args:
        modelled: makes the table of a model that nobody has profiled.
    """

    def __init__(self, modelled: Callable[[str, ModelSpec], Lut]) -> None:
        self._modelled = modelled
        self._stored: dict[tuple[str, str], Lut] = {}

    def put(self, lut: Lut) -> str:
        """Take a stored table; returns why it is of no use here, or an empty string."""
        device, axes = lut.device, lut.axes
        clocks = (device.default_clock_mhz, device.f_max_mhz)
        if not all(axes.clocks_mhz[0] <= clock <= axes.clocks_mhz[-1] for clock in clocks):
            return f"it was profiled at {axes.clocks_mhz} MHz, and the device runs at others too"
        if axes.shares_pct[0] > device.sm_sizes_pct[0] or axes.shares_pct[-1] < 100:
            return f"it was profiled at {axes.shares_pct} % of the SMs, and the device gives other shares too"
        self._stored[device.name, lut.model.name] = lut
        return ""

    def get(self, gpu_type: str, model: ModelSpec) -> Lut:
        """Return the table of a model on a GPU type. Raises ConfigError for a type that is not known."""
        stored = self._stored.get((gpu_type, model.name))
        if stored is not None and _shape(stored.model) == _shape(model):
            return stored
        return self._modelled(gpu_type, model)


class Kept:
    """Modelled tables, each made once as long as its model is there and stays as it is.

    Args:
        modelled: makes one.
    """

    def __init__(self, modelled: Callable[[str, ModelSpec], Lut]) -> None:
        self._modelled = modelled
        self._tables: dict[str, dict[str, Lut]] = {}  # by model and GPU type

    def __call__(self, gpu_type: str, model: ModelSpec) -> Lut:
        """Return the table of a model on a GPU type. Raises ConfigError for a type that is not known."""
        tables = self._tables.setdefault(model.name, {})
        found = tables.get(gpu_type)
        if found is None or found.model != model:
            found = tables[gpu_type] = self._modelled(gpu_type, model)
        return found

    def forget(self, name: str) -> None:
        """Drop the tables of a model that is gone."""
        self._tables.pop(name, None)


def _shape(model: ModelSpec) -> tuple[int, ...]:
    """What a table depends on: two models of one name may differ, when one was registered anew."""
    return (model.params, model.layers, model.heads, model.weight_bytes, model.kv_bytes_per_token)
