"""The look-up tables that a scheduler decides by: a stored one if there is one, else a modelled one (3.2)."""

from collections.abc import Callable

from shared.lut import Lut
from shared.model import ModelSpec

SHAPES_KEPT = 128  # 1.2 MB each, once it has been asked for all clocks and shares


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
        sizes_pct = device.sm_sizes_pct
        if axes.shares_pct[0] > sizes_pct[0] or axes.shares_pct[-1] < sizes_pct[-1]:
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
    """Modelled tables, those asked for last. Models of one shape share one, whatever their names and weights.

    Args:
        modelled: makes one.
    """

    def __init__(self, modelled: Callable[[str, ModelSpec], Lut]) -> None:
        self._modelled = modelled
        self._tables: dict[tuple[object, ...], Lut] = {}  # the one asked for last is the last

    def __call__(self, gpu_type: str, model: ModelSpec) -> Lut:
        """Return the table of a model on a GPU type. Raises ConfigError for a type that is not known."""
        key = (gpu_type, *_shape(model), *_sizes(model))
        found = self._tables.pop(key, None) or self._modelled(gpu_type, model)
        self._tables[key] = found
        if len(self._tables) > SHAPES_KEPT:
            del self._tables[next(iter(self._tables))]
        return found.of(model)


def _shape(model: ModelSpec) -> tuple[int, ...]:
    """What a table depends on: two models of one name may differ, when one was registered anew."""
    return (model.params, model.layers, model.heads, model.weight_bytes, model.kv_bytes_per_token)


def _sizes(model: ModelSpec) -> tuple[int, ...]:
    """What else a modelled table depends on (`silicon.step_work`); measured ones contain it."""
    return (model.hidden, model.head_dim, model.vocab_tokens, model.tied_embeddings)
