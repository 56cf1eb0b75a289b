"""The models of this node: what the operator's file and callers of Add name, with what their checkpoints say."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from balloond.keeper.client import KeeperClient, Kept
from kv_kinds.layout import KvLayout
from loader.catalogue import added, catalogue
from loader.catalogue.added import AddedModel
from loader.catalogue.catalogue import CatalogueEntry
from loader.checkpoints import adapter_folder, checkpoint
from loader.checkpoints.adapter_folder import AdapterCheckpoint
from loader.checkpoints.checkpoint import Checkpoint
from loader.checkpoints.errors import BrokenCheckpoint, PassingFault
from loader.checkpoints.text_trials import TextFault
from loader.policy.adapter_pool import Pool, pool
from loader.policy.floor import floor_bytes
from protos import keeper_pb2
from services.errors import Exists, NotFound, Unavailable, Unmet
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_LOOKS_AT_ONCE = 4
_REMOVED = 1000
"""Number of removed names whose change is kept, the latest: a loader that was away while more were removed, and had one
of those before, brings it back."""


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes for what entries do not give; see LoaderConfig."""

    dtype_bytes: int
    kv_extent_bytes: int
    quota_bytes: int


@dataclass(frozen=True)
class CatalogueModel:
    """One model. Either its checkpoint could be read, or `error` says why not: then it has no sizes, unless it could be
    read before and the fault may pass."""

    listed: CatalogueEntry
    sizes: Sizes
    checkpoint: Checkpoint | None
    """None also of an adapter."""
    error: str = ""
    """Why its own files cannot be served; what is wrong with an adapter's base is no part of it (`adapter_fault`)."""
    added: bool = False
    """Whether a call added it, not the file."""
    may_pass: bool = False
    """Whether the error may pass while the files stay as they are."""
    seen: int = 0
    """Generation of the files that have the error; 0: it could not be read."""
    reading: int = field(default=0, compare=False)
    """A number that is another one each time that its files were read afresh."""
    adapter: AdapterCheckpoint | None = None
    """What an adapter's files say; None: it is none, or they could not be read."""

    @property
    def generation(self) -> int:
        found = self.checkpoint or self.adapter
        return found.generation if found is not None else 0

    @property
    def context_tokens(self) -> int:
        if self.checkpoint is None:
            return 0
        return self.listed.context_tokens or self.checkpoint.context_tokens

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on each device, with the tables that engines make for the context; 0 without a
        checkpoint. An engine measures the exact number when it loads."""
        return 0 if self.checkpoint is None else self.checkpoint.held_bytes(self.context_tokens)

    @property
    def floor_bytes(self) -> int:
        """Bytes of KV on each device that the model always has (`policy/floor.py`); 0 without a checkpoint."""
        if self.checkpoint is None:
            return 0
        extent = self.sizes.kv_extent_bytes
        return floor_bytes(self.context_tokens, self.listed.floor_tokens, self.checkpoint.kv, extent)

    @property
    def kv(self) -> KvLayout:
        """The kinds of KV on each device, states in whole extents; no kinds without a checkpoint."""
        if self.checkpoint is None:
            return KvLayout()
        return self.checkpoint.kv.in_extents(self.sizes.kv_extent_bytes)

    @property
    def quota_bytes(self) -> int:
        return self.sizes.quota_bytes if self.listed.quota_bytes is None else self.listed.quota_bytes


Models = Mapping[str, CatalogueModel]
"""Models by name."""


def adapter_fault(adapter: CatalogueModel, models: Models) -> str:
    """Why an adapter among these models cannot be served, in one line; empty: it can."""
    if adapter.error or adapter.adapter is None:
        return adapter.error
    base = models.get(adapter.listed.base)
    if base is None:
        return f"its base {adapter.listed.base!r} is not in the catalogue"
    if base.listed.base:
        return f"its base {base.listed.name!r} is an adapter itself, of {base.listed.base!r}"
    if base.checkpoint is None:
        return f"its base {base.listed.name!r} cannot be served: {base.error}"
    if base.checkpoint.no_adapters:
        return base.checkpoint.no_adapters
    return adapter_folder.unfit(adapter.adapter, base.checkpoint.layers, base.checkpoint.linears)


def adapter_room(base: CatalogueModel, models: Models) -> Pool | None:
    """The room that an engine of the model needs for those adapters among these models that can be served; None: it has
    none."""
    of_it = [each for each in models.values() if each.listed.base == base.listed.name]
    found = [each.adapter for each in of_it if each.adapter is not None and not adapter_fault(each, models)]
    if not found or base.checkpoint is None:
        return None
    ranks = [each.rank for each in found]
    changed = {linear.name for each in found for linear in each.linears}
    return pool(ranks, changed, base.checkpoint.linears, base.checkpoint.layers, base.sizes.dtype_bytes)


def read_model(listed: CatalogueEntry, sizes: Sizes, added: bool = False) -> CatalogueModel:
    """Reads a model's checkpoint. Blocks on the file system and never fails: what is wrong is the model's error."""
    seen = _generation(listed)
    try:
        if listed.base:
            return CatalogueModel(listed, sizes, None, "", added, adapter=adapter_folder.read(listed.path, seen))
        found = checkpoint.read(
            listed.path,
            sizes.dtype_bytes,
            listed.devices,
            listed.task,
            kv_dtype=listed.kv_dtype,
            unverified=listed.unverified,
        )
        _check_lengths(listed, found)
    except BrokenCheckpoint as error:
        return CatalogueModel(listed, sizes, None, _one_line(error), added, error.may_pass, seen)
    except Exception as error:  # the other models of the catalogue have to be served
        _log.exception("a model's files were not understood", model=listed.name, path=listed.path)
        why = f"its files were not understood: {type(error).__name__}: {_one_line(error)}"
        return CatalogueModel(listed, sizes, None, why, added, False, seen)
    return CatalogueModel(listed, sizes, found, "", added)


_LONGEST_MESSAGE = 1200
"""Most characters of a file's own words in a message."""


def _one_line(error: Exception) -> str:
    """The message in one line that can be sent and printed, whatever a file had in it: no control characters, and no
    more than a screen of it."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE // 2]} … {text[-_LONGEST_MESSAGE // 2 :]}"
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return shown.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class FolderReport:
    """What a look at a model's files has shown."""

    model: CatalogueModel
    changed: bool = False
    """Whether the files are whole, and others than those that the model was read from."""


def look_again(model: CatalogueModel, thorough: bool) -> FolderReport:
    """Looks at a model's files: by their names, sizes and times, or, if `thorough`, by reading. The report has the same
    model where they are what they were, and as good as they were; otherwise the model as they are now. Files that have
    changed and are whole leave the model as it is, too: a catalogue says what it was read from. Blocks on the file
    system."""
    now = _generation(model.listed)
    if not thorough:
        if not model.error and now == model.generation:
            return FolderReport(model)
        if model.error and not model.may_pass and now == model.seen:
            return FolderReport(model)
    found = _read_again(model)
    if not found.error:
        return FolderReport(found) if model.error else FolderReport(model, found.generation != model.generation)
    if found.may_pass:  # its image, if there is one, stays its image
        found = replace(found, checkpoint=model.checkpoint, adapter=model.adapter)
    return FolderReport(replace(found, reading=model.reading))


def _read_again(model: CatalogueModel) -> CatalogueModel:
    return read_model(model.listed, model.sizes, model.added)


def _generation(listed: CatalogueEntry) -> int:
    """Generation of a model's files; 0: they cannot be read."""
    try:
        return checkpoint.fingerprint(Path(listed.path), listed.devices, listed.task)
    except OSError:
        return 0


def _check_lengths(listed: CatalogueEntry, found: Checkpoint) -> None:
    if listed.context_tokens > found.context_tokens:
        raise BrokenCheckpoint(
            f"the catalogue gives it context_tokens {listed.context_tokens}, its checkpoint has {found.context_tokens}"
        )
    context = listed.context_tokens or found.context_tokens
    if listed.floor_tokens and listed.floor_tokens < context:
        raise BrokenCheckpoint(
            f"the catalogue gives it floor_tokens {listed.floor_tokens}, less than one request of {context} tokens;"
            " give it context_tokens to serve shorter ones"
        )


def _without_taken_aliases(called: Sequence[CatalogueEntry], file: Sequence[CatalogueEntry]) -> list[CatalogueEntry]:
    """The entries that calls added, without aliases that the operator's file has come to use meanwhile."""
    names = {one.name for one in (*called, *file)}
    taken = names.union(*(one.aliases for one in file))
    found = []
    for one in called:
        kept = tuple(alias for alias in one.aliases if alias not in taken)
        if kept != one.aliases:
            lost = sorted(set(one.aliases).difference(kept))
            _log.warning("aliases of an added model are others' now, dropped", model=one.name, aliases=lost)
        found.append(one.model_copy(update={"aliases": kept}))
    return found


class NodeModels:
    """All models by name. Files are read in threads; changes are made one after the other. The keeper knows those that
    were added by calls."""

    def __init__(
        self,
        sizes: Sizes,
        on_change: Callable[[], None],
        keeper: KeeperClient,
        text_fault: Callable[[str, int, Callable[[], int]], Awaitable[TextFault | None]] | None = None,
        most_removed: int = _REMOVED,
    ) -> None:
        """`text_fault`: see TextTrials; left out, tokenizers and chat templates are not tried."""
        self._most_removed = most_removed
        self._sizes = sizes
        self._on_change = on_change
        self._keeper = keeper
        self._text_fault = text_fault
        self._models: dict[str, CatalogueModel] = {}
        self._changes: dict[str, int] = {}
        """Number of the last change of each name that a call changed last: models that were added, and what was
        removed."""
        self._changing = asyncio.Lock()
        self._refused: dict[str, int] = {}
        """Reading of the files that an engine could not use, by model."""
        self._readings = itertools.count(time.time_ns())
        """Numbers of readings, from the time of day on: those of two processes differ."""
        # A file system that hangs holds up these threads, and nothing else.
        self._looking = ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="look")

    def all(self) -> Sequence[CatalogueModel]:
        return list(self._models.values())

    def find(self, name: str) -> CatalogueModel | None:
        return self._models.get(name)

    @property
    def by_name(self) -> Models:
        return self._models

    def change(self, name: str) -> int:
        """Number of the call that changed the name last; 0: none did."""
        return self._changes.get(name, 0)

    @property
    def removed(self) -> dict[str, int]:
        """Names that calls removed, with the numbers of these calls."""
        return {name: change for name, change in self._changes.items() if name not in self._models}

    def get(self, name: str) -> CatalogueModel:
        """The model of this name. Raises NotFound."""
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"no model {name!r} in the catalogue")
        return model

    async def check_unchanged(self, name: str) -> None:
        """Checks that the files of a model are those that the catalogue speaks of. Raises Unmet where they are others,
        Unavailable where they cannot be read now, NotFound."""
        model = self.get(name)
        now = await asyncio.to_thread(_generation, model.listed)
        if not now:
            raise Unavailable(f"the files of {name} cannot be read now, and may be others than the catalogue's")
        if now != model.generation:
            raise Unmet(f"the files of {name} have changed since the catalogue was read, which has to be reloaded")

    def is_refused(self, name: str) -> bool:
        """Whether an engine could not use the model's files as they were read last, so that they have to be compared
        again."""
        model = self._models.get(name)
        return model is not None and self._refused.get(name) == model.reading

    async def look(self, name: str, thorough: bool = False, refused: bool = False) -> FolderReport:
        """Looks at a model's files (`look_again`) and puts the model as they are now into the catalogue. Files that
        have changed count where an engine has `refused` those before them. Raises NotFound."""
        before = self.get(name)
        if refused and not before.error and not self.is_refused(name):
            self._refused[name] = before.reading
            self._on_change()
        looked = await self._looked(before, thorough)
        if looked.changed and self.is_refused(name):
            again = await asyncio.get_running_loop().run_in_executor(self._looking, _read_again, before)
            looked = replace(looked, model=again)
        found = looked.model if looked.model is before else await self._tried(looked.model)
        if found == before or self._models.get(name) is not before:
            return replace(looked, model=self.get(name))  # nothing is new, or it was read otherwise meanwhile
        if not found.error:
            found = replace(found, reading=next(self._readings))
            _log.info("model can be served again", model=name, path=found.listed.path)
        elif found.error != before.error:
            _log.warning("model cannot be served", model=name, path=found.listed.path, why=found.error)
        self._models[name] = found
        self._on_change()
        return replace(looked, model=found)

    async def _looked(self, model: CatalogueModel, thorough: bool = False) -> FolderReport:
        """The report of `look_again`, which blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._looking, look_again, model, thorough)

    async def _tried(self, model: CatalogueModel) -> CatalogueModel:
        """The model, in error where its files are whole but its tokenizer, chat template or configuration cannot be
        used, or where they went away during the trial: then in the error that a look finds."""
        if model.error or model.listed.base or self._text_fault is None:
            return model
        fault = await self._text_fault(model.listed.path, model.generation, partial(_generation, model.listed))
        if fault is None:
            return model
        if fault.may_pass and (gone := (await self._looked(model)).model).error:
            return gone
        # A fault that passes, as of a folder that went away meanwhile, leaves the sizes that were read.
        kept = model.checkpoint if fault.may_pass else None
        return replace(model, checkpoint=kept, error=fault.why, may_pass=fault.may_pass, seen=model.generation)

    async def _try_all(self, models: Sequence[CatalogueModel]) -> None:
        """Tries all models of a catalogue, which are served meanwhile: each takes a second."""
        for model in models:
            found = await self._tried(model)
            if found is not model and self._models.get(model.listed.name) is model:
                _log.warning("model cannot be served", model=model.listed.name, path=model.listed.path, why=found.error)
                self._models[model.listed.name] = found
                self._on_change()

    async def inspect(self, listed: CatalogueEntry) -> CatalogueModel:
        """The model that adding `listed` would give; nothing changes. Raises BrokenCheckpoint, also of an
        adapter whose base is not there, or another model."""
        model = await self._tried(await asyncio.to_thread(read_model, listed, self._sizes))
        if model.error:
            raise (PassingFault if model.may_pass else BrokenCheckpoint)(model.error)
        if listed.base and (why := adapter_fault(model, self._models)):
            raise BrokenCheckpoint(why)
        return model

    async def add(self, listed: CatalogueEntry, change: int = 0) -> CatalogueModel:
        """Adds a model, for the successors of this process too: returns once the keeper knows. If a model of the same
        path is there, its files are read afresh; the settings of one that the file lists stay the operator's. `change`:
        see protos/loader.proto. Raises Exists for another path, a setting that differs from the file's, or a name or
        alias that another model has, BrokenCheckpoint."""
        async with self._changing:
            present = self._models.get(listed.name)
            if present is not None:
                if os.path.realpath(present.listed.path) != os.path.realpath(listed.path):
                    raise Exists(f"the name {listed.name!r} is taken by the model at {present.listed.path}")
                if not present.added:
                    listed = _of_file(present.listed, listed)
            try:
                catalogue.check_names([*self._listed(but=listed.name), listed])
            except ValueError as error:
                raise Exists(str(error)) from None
            model = await self.inspect(listed)
            model = replace(model, added=present is None or present.added, reading=next(self._readings))
            self._models[listed.name] = model
            if model.added:
                self._changes[listed.name] = change or 1 + max(self._changes.values(), default=0)
            _log.info("model added", model=listed.name, path=listed.path)
            self._on_change()
            if model.added:
                await self._keeper.keep([self._kept(listed.name)])
        return model

    def _listed(self, *, but: str = "") -> list[CatalogueEntry]:
        """The entries of all models, but for the one of that name."""
        return [model.listed for name, model in self._models.items() if name != but]

    async def remove(self, name: str, change: int = 0) -> None:
        """Removes a model. One that the file lists is back at the next start or reload. For any other name a `change`
        is kept, also for the successors of this process. Raises NotFound."""
        async with self._changing:
            model = self._models.pop(name, None)
            if model is None or model.added:
                self._changes.pop(name, None)
                if change:
                    self._changes[name] = change
                elif model is not None:
                    self._keeper.forget_soon([added.record_id(name)])
            if model is not None:
                _log.info("model removed", model=name)
            self._forget_oldest()
            self._on_change()
            if name in self._changes:
                await self._keeper.keep([self._kept(name)])
            if model is None:
                raise NotFound(f"no model {name!r} in the catalogue")

    def _forget_oldest(self) -> None:
        removed = self.removed
        self._forget(sorted(removed, key=removed.__getitem__)[: -self._most_removed])

    def _forget(self, names: Sequence[str]) -> None:
        """Forgets that a call changed these names last."""
        self._keeper.forget_soon([added.record_id(name) for name in names])
        for name in names:
            del self._changes[name]

    async def reload(self, path: str) -> None:
        """Makes the catalogue what the file at `path` says now, plus what was added by calls and the file does not
        name, and reads all checkpoints afresh. Raises ValueError with one line when the file cannot be used: then
        nothing has changed."""
        async with self._changing:
            listed = await asyncio.to_thread(catalogue.read, path)
            called = [model.listed for model in self._models.values() if model.added]
            names = {one.name for one in listed}
            try:
                catalogue.check_names([*listed, *(one for one in called if one.name not in names)])
            except ValueError as error:
                raise ValueError(f"{path}: {error}, beside the models that were added by calls") from None
            self._models = await self._read(listed, self._unlisted(called, names))
        _log.info("catalogue read", path=path, models=len(self._models), broken=sum(bool(m.error) for m in self.all()))
        self._on_change()

    async def restore(self, records: Iterable[keeper_pb2.Record]) -> None:
        """Takes in what calls changed at a predecessor, after the file was read; records that cannot be understood are
        forgotten."""
        called: list[AddedModel] = []
        for record in records:
            try:
                called.append(added.restore(record))
            except ValueError as error:
                _log.warning("added model not understood, forgotten", why=str(error))
                self._keeper.forget_soon([record.id])
        async with self._changing:
            self._changes |= {one.name: one.change for one in called}
            listed = [one.listed for one in called if one.listed is not None]
            unlisted = self._unlisted(listed, set(self._models))
            self._models |= await self._read((), _without_taken_aliases(unlisted, self._listed()))
        self._on_change()

    def _unlisted(self, called: Sequence[CatalogueEntry], names: Container[str]) -> Sequence[CatalogueEntry]:
        """Entries of `called` that the file, with its `names`, leaves to calls. The other names are the operator's now,
        those that were removed among them."""
        self._forget([name for name in self._changes if name in names])
        return [one for one in called if one.name not in names]

    async def _read(
        self, listed: Iterable[CatalogueEntry], called: Iterable[CatalogueEntry]
    ) -> dict[str, CatalogueModel]:
        reads = [asyncio.to_thread(read_model, one, self._sizes) for one in listed]
        reads += [asyncio.to_thread(read_model, one, self._sizes, True) for one in called]
        models = await asyncio.gather(*reads)
        for model in models:
            if model.error:
                _log.warning("model cannot be served", model=model.listed.name, path=model.listed.path, why=model.error)
        read = {model.listed.name: replace(model, reading=next(self._readings)) for model in models}
        tasks.spawn(self._try_all(list(read.values())), "try the catalogue's tokenizers")
        return read

    def everything(self) -> Iterable[Kept]:
        """All records of calls, for a keeper that came back empty."""
        return [self._kept(name) for name in self._changes]

    def _kept(self, name: str) -> Kept:
        model = self._models.get(name)
        return added.record(AddedModel(name, self._changes[name], None if model is None else model.listed)), None


def _of_file(present: CatalogueEntry, asked: CatalogueEntry) -> CatalogueEntry:
    """The entry of a model that the catalogue file lists, which `asked` may repeat, as far as it says anything. Raises
    Exists for a setting that differs: the file's operator sets it."""
    for name, about in CatalogueEntry.model_fields.items():
        given = getattr(asked, name)
        if name != "path" and given != about.default and given != getattr(present, name):
            raise Exists(f"{present.name!r} is in the catalogue file: change its {name!r} there")
    return present
