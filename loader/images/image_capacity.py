"""Whether a model can have an image at all, and why one cannot."""

from __future__ import annotations

from collections.abc import Callable

from loader.catalogue.models import CatalogueModel, NodeModels
from loader.images.images import Images
from services.errors import Refused


class ImageCapacity:
    """The host memory that there is for images of models. `is_pinned`: whether a model's image gives way to no
    other."""

    def __init__(self, models: NodeModels, images: Images, is_pinned: Callable[[CatalogueModel], bool]) -> None:
        self._models = models
        self._images = images
        self._is_pinned = is_pinned

    def why_none(self, model: CatalogueModel) -> str:
        """Why there can be no image of a model as things are, in one line; empty where there is one, or can be."""
        if model.checkpoint is None or self._held_bytes(model):
            return ""
        others = {other.listed.name: self._held_bytes(other) for other in self._pinned_beside(model)}
        return self._short(model, {name: nbytes for name, nbytes in others.items() if nbytes})

    def check_pin(self, model: CatalogueModel) -> None:
        """Raises Refused for a model whose image could not stay beside those that are pinned."""
        if model.checkpoint is None or self._is_pinned(model):
            return
        others = {other.listed.name: self._bytes(other) for other in self._pinned_beside(model)}
        capacity = self._images.capacity_bytes
        if short := self._short(model, {name: nbytes for name, nbytes in others.items() if nbytes <= capacity}):
            raise Refused(f"{model.listed.name} is not pinned, since it can have no image to stay: {short}")

    def _short(self, model: CatalogueModel, taken: dict[str, int]) -> str:
        need, capacity = self._bytes(model), self._images.capacity_bytes
        if need + sum(taken.values()) <= capacity:
            return ""
        beside = f", {_mib(sum(taken.values()))} of it for what is pinned ({', '.join(sorted(taken))})" if taken else ""
        return f"its weights take {_mib(need)}, all images together may take {_mib(capacity)}{beside}"

    def _pinned_beside(self, model: CatalogueModel) -> list[CatalogueModel]:
        return [other for other in self._models.all() if other is not model and self._is_pinned(other)]

    def _held_bytes(self, model: CatalogueModel) -> int:
        """Bytes of the image that there is."""
        parts = self._images.parts(model.listed.name)
        return sum(part.held_bytes for part in parts if part.generation == model.generation)

    def _bytes(self, model: CatalogueModel) -> int:
        """Bytes of the model's image, or of one that would be made, as near as headers tell."""
        weights = model.listed.devices * model.weights_bytes
        return self._held_bytes(model) or weights


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
