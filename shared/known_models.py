"""What a service's core knows of models, and what the store says otherwise once its bus is back."""

from collections.abc import Iterable

from shared import events as ev
from shared.model import ModelSpec


class KnownModels:
    """Keeps in step with a core, for its shell.

    Attributes:
        specs: as the core knows them.
        heard: names that the bus has brought news of since it is back: newer than what is read.
    """

    def __init__(self) -> None:
        self.specs: dict[str, ModelSpec] = {}
        self.heard: set[str] = set()

    def note(self, event: ev.Message | ev.Event) -> None:
        """The core is told of this."""
        match event:
            case ev.ModelRegistered(model=model):
                self.specs[model.name] = model
            case ev.ModelRemoved(model=name):
                self.specs.pop(name, None)
            case ev.BusRestored():
                self.heard.clear()

    def hear(self, message: ev.Message) -> None:
        """The bus has brought this."""
        match message:
            case ev.ModelRegistered(model=model):
                self.heard.add(model.name)
            case ev.ModelRemoved(model=name):
                self.heard.add(name)

    def news(
        self, stored: Iterable[ModelSpec], missing: set[str] | None
    ) -> tuple[list[ev.Message], set[str]]:
        """Return what the core is to be told after a look at the store, and the models that are missing now.

        A model counts as removed only if it was `missing` at the look before as well, for the writer of a
        change may be late with it, and if nobody has spoken of it since the bus is back.
        """
        models = {model.name: model for model in stored}
        told: list[ev.Message] = [
            ev.ModelRegistered(model=model)
            for name, model in models.items()
            if self.specs.get(name) != model and name not in self.heard
        ]
        missing_now = self.specs.keys() - models.keys() - self.heard
        told += [ev.ModelRemoved(model=name) for name in sorted(missing_now & (missing or set()))]
        return told, missing_now
