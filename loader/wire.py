"""Conversions between the messages of protos/loader.proto and the loader's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pydantic
from google.protobuf.message import DecodeError

from kv_kinds import messages
from loader.catalogue.catalogue import CatalogueEntry, Name
from loader.catalogue.models import CatalogueModel, Models, adapter_fault, adapter_room
from loader.copies.jobs import CopyJob, JobProgress, Result
from loader.images.disk import StoredImage
from loader.images.image_memory import Image
from protos import common_pb2, engine_pb2, loader_pb2
from services.errors import Invalid
from services.runtime.config import faults

_LAST_CHANGE = 1 << 62
_NAME: pydantic.TypeAdapter[str] = pydantic.TypeAdapter(Name)


def listed(message: common_pb2.ModelListing) -> CatalogueEntry:
    """The entry that a listing describes. Raises Invalid naming the field."""
    if not Path(message.path).is_absolute():
        raise Invalid(f"path: {message.path!r} is not absolute")
    try:
        return CatalogueEntry(
            name=message.name,
            path=message.path,
            ttft_ms=message.default_slo.ttft_ms,
            tpot_ms=message.default_slo.tpot_ms,
            pinned=message.pinned,
            devices=message.devices or 1,  # type: ignore[arg-type]  # likewise
            most_replicas=message.most_replicas,
            engine=message.engine,  # type: ignore[arg-type]  # one that there is not is refused
            quota_bytes=message.quota_bytes if message.HasField("quota_bytes") else None,
            context_tokens=message.context_tokens,
            floor_tokens=message.floor_tokens,
            tool_parser=message.tool_parser,
            reasoning_parser=message.reasoning_parser,
            task=message.task,  # type: ignore[arg-type]  # likewise
            unverified=message.unverified,
            kv_dtype=message.kv_dtype,  # type: ignore[arg-type]  # likewise
            aliases=tuple(message.aliases),
            base=message.base,
        )
    except pydantic.ValidationError as error:
        wrong = [f"{fault.key}: {fault.what}" if fault.at else fault.what for fault in faults(error)]
        raise Invalid("; ".join(wrong)) from None


def change(number: int) -> int:
    """The number of a change of the catalogue. Raises Invalid for one that no higher one can follow."""
    if not 0 <= number <= _LAST_CHANGE:
        raise Invalid(f"change: {number} is not from 0 to {_LAST_CHANGE}")
    return number


def removed_name(name: str) -> str:
    """The name of a model that is to be removed. Raises Invalid for one that no model can have, because a record is
    kept of names that one can."""
    try:
        return _NAME.validate_python(name)
    except pydantic.ValidationError as error:
        raise Invalid(f"name: {faults(error)[0].what}") from None


def listing(listed: CatalogueEntry) -> common_pb2.ModelListing:
    """The listing from which `listed` gives this entry."""
    return common_pb2.ModelListing(
        name=listed.name,
        path=listed.path,
        default_slo=common_pb2.Slo(ttft_ms=listed.ttft_ms, tpot_ms=listed.tpot_ms),
        pinned=listed.pinned,
        devices=listed.devices,
        most_replicas=listed.most_replicas,
        engine=listed.engine,
        quota_bytes=listed.quota_bytes,
        context_tokens=listed.context_tokens,
        floor_tokens=listed.floor_tokens,
        tool_parser=listed.tool_parser,
        reasoning_parser=listed.reasoning_parser,
        task=listed.task,
        unverified=listed.unverified,
        kv_dtype=listed.kv_dtype,
        aliases=listed.aliases,
        base=listed.base,
    )


def model_spec(model: CatalogueModel, models: Models | None = None) -> common_pb2.ModelSpec:
    """A model among these `models`: with room for its adapters there. An adapter is as its base, but for what is its
    own."""
    models = models or {}
    if model.listed.base:
        return _adapter_spec(model, models)
    spec = _own_spec(model)
    if (room := adapter_room(model, models)) is not None:
        spec.weights_bytes += room.nbytes
        spec.adapters.slots, spec.adapters.rank, spec.adapters.bytes = room.slots, room.rank, room.nbytes
        spec.adapters.modules.extend(room.modules)
    return spec


def _adapter_spec(model: CatalogueModel, models: Models) -> common_pb2.ModelSpec:
    listed, found, base = model.listed, model.adapter, models.get(model.listed.base)
    spec = common_pb2.ModelSpec(name=listed.name, path=listed.path)
    if found is not None and base is not None and not adapter_fault(model, models):
        spec = model_spec(base, models)
        spec.name, spec.weights_bytes = listed.name, found.elements * model.sizes.dtype_bytes
        for name in ("floor_bytes", "quota_bytes", "pinned", "aliases", "most_replicas"):
            spec.ClearField(name)  # type: ignore[arg-type]
        spec.tool_parser = listed.tool_parser or spec.tool_parser
        spec.reasoning_parser = listed.reasoning_parser or spec.reasoning_parser
    spec.aliases.extend(listed.aliases)
    if listed.ttft_ms or listed.tpot_ms:
        spec.default_slo.CopyFrom(common_pb2.Slo(ttft_ms=listed.ttft_ms, tpot_ms=listed.tpot_ms))
    spec.adapter.CopyFrom(common_pb2.Adapter(name=listed.name, base=listed.base, path=listed.path))
    if found is not None:
        spec.adapter.generation, spec.adapter.rank = found.generation, found.rank
        spec.adapter.modules.extend(each.name for each in found.linears)
    return spec


def _own_spec(model: CatalogueModel) -> common_pb2.ModelSpec:
    """What a model's own entry and files say."""
    spec = common_pb2.ModelSpec(
        name=model.listed.name,
        path=model.listed.path,
        default_slo=common_pb2.Slo(ttft_ms=model.listed.ttft_ms, tpot_ms=model.listed.tpot_ms),
        pinned=model.listed.pinned,
        engine=model.listed.engine,
        quota_bytes=model.listed.devices * model.quota_bytes,
        quota_is_default=model.listed.quota_bytes is None,
        devices=model.listed.devices,
        most_replicas=model.listed.most_replicas,
        tool_parser=model.listed.tool_parser,
        reasoning_parser=model.listed.reasoning_parser,
        aliases=model.listed.aliases,
        kv_dtype=model.listed.kv_dtype,
    )
    found = model.checkpoint
    if found is not None:
        spec.generation = found.generation
        spec.architecture = found.architecture
        spec.context_tokens = model.context_tokens
        spec.weights_bytes = model.listed.devices * model.weights_bytes
        spec.position_bytes = model.listed.devices * found.position_bytes
        spec.kv_bytes_per_token = model.listed.devices * found.kv_bytes_per_token
        spec.kv_kinds.extend(messages.kinds(model.kv.times(model.listed.devices)))
        spec.floor_bytes = model.listed.devices * model.floor_bytes
        spec.vocab_size = found.vocabulary
        spec.quantisation = found.quantisation
        spec.active_bytes = model.listed.devices * found.active_bytes
        spec.unverified = not found.verified
        if (made := found.embedding) is not None:
            spec.embedding.dimensions = made.dimensions
            spec.embedding.shortens = made.shortens
            spec.embedding.shorter.extend(made.shorter)
            spec.embedding.pooling = made.pooling
        if found.reranker is not None:
            spec.reranker.SetInParent()
            for name, value in vars(found.reranker).items():
                if value is not None:
                    setattr(spec.reranker, name, value)
        for name, value in vars(found.sampling).items():
            if value is not None:
                setattr(spec.sampling, name, value)
    return spec


def entry(
    model: CatalogueModel,
    parts: Sequence[Image],
    stored: Sequence[StoredImage] = (),
    image_pinned: bool = False,
    change: int = 0,
    retry_s: float = 0.0,
    no_image: str = "",
    models: Models | None = None,
) -> loader_pb2.Entry:
    """A model's entry in a catalogue of these `models`. `parts` and `stored` are the parts of its image in host memory
    and on disk, by rank. An image that is not whole, or of another generation than the checkpoint's, is not shown:
    nothing that starts now can use it. `change`: the number of the call that added it. `retry_s`, in seconds, and
    `no_image`: see protos/loader.proto."""
    shown = loader_pb2.Entry(
        model=model_spec(model, models),
        error=adapter_fault(model, models or {}) if model.listed.base else model.error,
        image_pinned=image_pinned,
        retry_s=retry_s,
        reading=model.reading,
        no_image=no_image,
    )
    if model.added:
        shown.listing.CopyFrom(listing(model.listed))
        shown.change = change
    here = _whole(model, parts)
    on_disk = _whole(model, stored)
    shown.has_image, shown.on_disk = bool(here), bool(on_disk)
    if usable := here or on_disk:
        shown.image_bytes = sum(part.total_bytes for part in usable)
        shown.image_checksum = usable[0].checksum
        shown.other_checksums.extend(part.checksum for part in usable[1:])
    return shown


def _whole(model: CatalogueModel, parts: Sequence[Image] | Sequence[StoredImage]) -> Sequence[Image | StoredImage]:
    """The parts if they are the whole image of the model's present generation, one for each rank; otherwise none."""
    usable = [part for part in parts if part.generation == model.generation]
    return usable if [part.rank for part in usable] == list(range(model.listed.devices)) else []


def catalogue(
    entries: Sequence[loader_pb2.Entry], removed: Mapping[str, int], capacity: int, used: int, revision: int
) -> loader_pb2.Catalogue:
    return loader_pb2.Catalogue(
        revision=revision, entries=entries, removed=removed, host_capacity_bytes=capacity, host_used_bytes=used
    )


def manifest_bytes(manifest: bytes) -> int:
    """Bytes of the range that a manifest describes. Raises Invalid for bytes that are no manifest, or one without a
    size."""
    try:
        total = int(engine_pb2.Manifest.FromString(manifest).total_bytes)
    except DecodeError:
        raise Invalid("manifest: not understood") from None
    if total <= 0:
        raise Invalid(f"manifest: total_bytes {total} is not the size of a range")
    return total


def progress(at: JobProgress) -> common_pb2.Progress:
    return common_pb2.Progress(
        step=at.step, done=at.done, total=at.total, unit="bytes", per_s=at.per_s, left_s=at.left_s
    )


def image_progress(step: JobProgress | Result) -> loader_pb2.ImageProgress:
    """One message of a save or a load; the last one, of a Result, has the image."""
    if isinstance(step, JobProgress):
        return loader_pb2.ImageProgress(progress=progress(step))
    whole = JobProgress("copying", step.total_bytes, step.total_bytes, left_s=0.0)
    return loader_pb2.ImageProgress(
        progress=progress(whole), checksum=step.checksum, image_bytes=step.total_bytes, source=step.source
    )


def under_way(job: CopyJob) -> loader_pb2.UnderWay:
    what = job.what
    return loader_pb2.UnderWay(
        kind=what.kind, lease_id=what.lease_id, rank=what.rank, callers=job.callers, progress=progress(job.at)
    )
