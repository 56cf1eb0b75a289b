"""Folders of models that a plan is made for, read as the loader reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.local.models import sizes
from kv_kinds import wording
from loader.checkpoints import checkpoint
from loader.checkpoints.adapter_folder import is_adapter
from loader.checkpoints.architectures.classes import CLASSES
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import INDEX, has_safetensors, indexed_bytes
from services.wording.plurals import counted
from services.wording.sizes import size
from sim.inputs.catalogue import FolderModel, FolderQuestion


@dataclass(frozen=True)
class ReadFolder:
    """One folder as it was read."""

    path: Path
    devices: int
    source: str
    """Source of the bytes of weights, in words that follow the bytes: "by its index"."""
    found: FolderModel
    """The model. Bytes of a state are those that the state fills, not rounded up to extents."""
    tables_bytes: int = 0
    """Bytes of its weights that are tables of rotary embeddings, of which a token reads a row."""

    @property
    def line(self) -> str:
        """One line of the answer for people."""
        found = self.found
        idle = found.active_bytes < found.weights_bytes - self.tables_bytes
        return (
            f"{self.path}: weights {size(found.weights_bytes)} {self.source}"
            + (f", {size(found.active_bytes)} of them for each token" if idle else "")
            + f"; KV {wording.described(found.kv)}; context up to {counted(found.context_tokens, 'token')}"
            + (f"; on {self.devices} devices together" if self.devices > 1 else "")
        )

    @property
    def told(self) -> dict[str, Any]:
        """Fields of the folder in the JSON answer."""
        found = self.found
        return {
            "folder": str(self.path),
            "devices": self.devices,
            "weights_bytes": found.weights_bytes,
            "weights_source": self.source,
            "active_bytes": found.active_bytes,
            "layers": found.layers,
            "kv": wording.described(found.kv),
            "kv_kinds": wording.listed(found.kv),
            "context_tokens": found.context_tokens,
        }


class PlanFolders:
    """Reads folders for a catalogue of the simulator, for engines on GPUs, and keeps what it found."""

    def __init__(self) -> None:
        self.read: dict[FolderQuestion, ReadFolder] = {}

    def __call__(self, question: FolderQuestion) -> FolderModel:
        """The model of a folder, states in whole extents. Raises ValueError with what is wrong with it."""
        if question not in self.read:
            try:
                self.read[question] = _read(question)
            except BrokenCheckpoint as error:
                instead = "" if error.may_pass else "; without a folder a row has weights_bytes and its KV"
                raise ValueError(f"{error}{instead}") from None
        found = self.read[question].found
        return replace(found, kv=found.kv.in_extents(question.devices * sizes(on_gpus=True).kv_extent_bytes))


def _read(question: FolderQuestion) -> ReadFolder:
    """Reads a folder. Raises ValueError, BrokenCheckpoint."""
    path, devices, floats = question.path, question.devices, sizes(on_gpus=True).dtype_bytes
    if path.is_dir() and is_adapter(path):
        raise ValueError("it is an adapter (LoRA), which takes no place of its own: name its requests as its base's")
    is_whole = path.is_dir() and has_safetensors(path)
    if is_whole:
        source = "by its files"
        model = checkpoint.read(path, floats, devices, kv_dtype=question.kv_dtype, unverified=question.unverified)
    else:
        model = checkpoint.read_config(
            path, floats, devices, kv_dtype=question.kv_dtype, unverified=question.unverified
        )
        known = CLASSES.get(model.architecture)
        images = ", without its part for images" if known is not None and known.wrapper else ""
        source = f"by its config.json{images}"
        # An index has the bytes of files: twice as many as an engine's where these have float32.
        is_whole = known is not None and not known.wrapper and not model.quantisation
    weights = computed = devices * model.weights_bytes
    tables = devices * model.held_bytes(model.context_tokens) - computed
    if question.weights_bytes:
        weights, tables, source = question.weights_bytes, 0, "by the catalogue"
    elif not is_whole and (indexed := indexed_bytes(path)):
        weights, source = indexed, "by its index"
    elif not weights:
        raise ValueError(
            f"its config.json does not tell the weights of a {model.architecture}: put its {INDEX} beside it, or give "
            "weights_bytes"
        )
    share = model.active_bytes / model.weights_bytes if computed else 1.0
    return ReadFolder(
        path,
        devices,
        source,
        FolderModel(
            weights_bytes=weights + tables,
            active_bytes=round(share * weights),
            layers=model.layers,
            expert_share=model.expert_share,
            kv=model.kv.times(devices),
            context_tokens=model.context_tokens,
        ),
        tables,
    )
