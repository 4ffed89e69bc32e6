"""What the gateway knows of the system: the models by name, and the newest summary of each GPU."""

from shared.model import GpuSummary, ModelSpec, is_outdated, slug


class Registry:
    """Models by exact, case-sensitive name; GPUs by id. Written by the core, read by the API."""

    def __init__(self) -> None:
        self.models: dict[str, ModelSpec] = {}
        self.gpus: dict[str, GpuSummary] = {}
        self.silent: set[str] = set()
        self._by_slug: dict[str, str] = {}

    def add(self, model: ModelSpec) -> None:
        """Add a model or replace the one of the same slug, which is the store's key as well."""
        former = self._by_slug.get(slug(model.name))
        if former is not None:
            del self.models[former]
        self.models[model.name] = model
        self._by_slug[slug(model.name)] = model.name

    def remove(self, name: str) -> None:
        """Forget a model, if it is there."""
        if self.models.pop(name, None) is not None:
            del self._by_slug[slug(name)]

    def conflict(self, model: ModelSpec) -> str:
        """Say why `model` cannot be added; empty if it can. An identical model is no conflict."""
        former = self._by_slug.get(slug(model.name))
        if former is None or self.models[former] == model:
            return ""
        if former == model.name:
            return f"model {former!r} is registered with other values; remove it first"
        return f"the name {model.name!r} is too like {former!r}: both are {slug(former)!r} on the bus"

    def visible(self, name: str, tenant: str) -> ModelSpec | None:
        """Return the model of that exact name if `tenant` may use it."""
        model = self.models.get(name)
        if model is None or (model.tenants and tenant not in model.tenants):
            return None
        return model

    def live_gpus(self) -> list[GpuSummary]:
        """Return the summaries of the GPUs that are heard of."""
        return [summary for gpu, summary in self.gpus.items() if gpu not in self.silent]

    def state_of(self, name: str) -> str:
        """Return ``ready`` if some GPU can run the model now, ``loading`` if one soon can, else ``cold``."""
        states = {
            engine.state
            for summary in self.live_gpus()
            for engine in summary.engines
            if engine.model == name and not is_outdated(engine, self.models[name])
        }
        return next((state for state in ("ready", "loading") if state in states), "cold")
