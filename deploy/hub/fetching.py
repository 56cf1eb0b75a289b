"""Fetching a model of the hub into the cache of `huggingface_hub`, whose settings (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE) hold here too."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.tqdm import silent_tqdm

from deploy.hub import faults, files
from deploy.hub.names import HubModel
from deploy.hub.progress import Progress
from loader.checkpoints import adapter_folder, checkpoint
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import INDEX
from services.errors import Unmet
from services.runtime.progress import size
from services.wording.plurals import counted

_HINTS = 3
_SHOWN = 12
"""Digits of a commit that are shown."""


class FetchFailed(Unmet):
    """A model of the hub cannot be fetched, or cannot be served; the message names it."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its path there, its bytes, and the name of its content in the cache."""

    path: str
    nbytes: int
    blob: str


@dataclass(frozen=True)
class FetchPlan:
    """A model, its folder in the cache, the files that the folder is to have, and those that it lacks. Without files:
    the folder is as it is to be."""

    model: HubModel
    folder: Path
    wanted: Sequence[str] = ()
    missing: Sequence[RemoteFile] = ()

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.missing)


class Hub:
    """A hub and the cache that its files go to; by default those of the environment."""

    def __init__(
        self,
        say: Callable[[str], None],
        endpoint: str = constants.ENDPOINT,
        cache: Path = Path(constants.HF_HUB_CACHE),
        *,
        adapters: bool = False,
    ) -> None:
        """`adapters`: what is fetched may be an adapter (LoRA)."""
        self._say = say
        self._endpoint = endpoint
        self._cache = cache
        self._adapters = adapters
        self._api = HfApi(endpoint=endpoint, library_name="prism-serve", library_version=_version())

    def fetch(
        self, models: Sequence[HubModel], dtype_bytes: int, *, unverified: Collection[HubModel] = ()
    ) -> Iterator[Path]:
        """The folders of the models, whose files are fetched if they are not there, each as soon as it is whole. All
        are looked at before anything large is fetched. `dtype_bytes`: bytes of a float on the devices; `unverified`:
        the models that `loader/catalogue/catalogue.py` calls so. Blocks. Raises FetchFailed; files that are complete
        by then stay."""
        plans = []
        for model in models:
            with self._telling(model):
                plans.append(self._plan(model, dtype_bytes, model in unverified))
        self._check_space(plans)
        for plan in plans:
            with self._telling(plan.model):
                self._complete(plan)
                if self._adapters and adapter_folder.is_adapter(plan.folder):
                    adapter_folder.read(plan.folder, 0)
                else:
                    checkpoint.read(plan.folder, dtype_bytes, unverified=plan.model in unverified)
            yield plan.folder

    @contextlib.contextmanager
    def _telling(self, model: HubModel) -> Iterator[None]:
        """A context whose errors become FetchFailed, which names the model."""
        try:
            yield
        except BrokenCheckpoint as error:
            raise FetchFailed(f"{model} cannot be served: {error}") from None
        except faults.EXPECTED as error:
            hint = self._hint(model) if type(error) is RepositoryNotFoundError else ""
            raise FetchFailed(faults.line(error, model, self._endpoint, self._cache) + hint) from error

    def _plan(self, model: HubModel, dtype_bytes: int, unverified: bool) -> FetchPlan:
        """Files of a model that are to be fetched, after its config.json was fetched and checked; none if the hub is
        away and the cache has the model. Raises BrokenCheckpoint, FetchFailed and the library's errors."""
        try:
            commit, there = self._listed(model, model.revision)
        except faults.EXPECTED as error:
            if not faults.is_unreachable(error):
                raise
            folder = self._from_cache(model, error)
            away = faults.unreachable(error, self._endpoint)
            self._say(f"{model}: {away}; the cache has it: commit {folder.name[:_SHOWN]}, {folder}")
            return FetchPlan(model, folder)
        if (why := files.fault([each.path for each in there], adapters=self._adapters)) is not None:
            raise BrokenCheckpoint(why)
        adapter = files.is_adapter([each.path for each in there])
        # Asked for by the revision's name, which the cache then knows for when the hub is away.
        folder = self._one(model, files.ADAPTER[0] if adapter else files.CONFIG, model.revision).parent
        if folder.name != commit:  # somebody has published meanwhile
            commit, there = self._listed(model, folder.name)
        if not adapter:
            checkpoint.check_config(folder, dtype_bytes, unverified=unverified)
        names = [each.path for each in there]
        if INDEX in names:
            self._one(model, INDEX, commit)
        wanted = files.of_model(names, _shards(folder))
        missing = [each for each in there if each.path in wanted and not self._is_cached(model, folder, each)]
        return FetchPlan(model, folder, wanted, missing)

    def _complete(self, plan: FetchPlan) -> None:
        """Fetches what is missing. Raises the library's errors."""
        if not plan.wanted:
            return
        commit, nbytes = plan.folder.name, plan.nbytes
        if plan.missing:
            what = f"{counted(len(plan.missing), 'file')} of {len(plan.wanted)}, {size(nbytes)}"
            self._say(f"{plan.model}: fetching {what}, of commit {commit[:_SHOWN]} to {self._cache}")
        else:
            self._say(f"{plan.model}: commit {commit[:_SHOWN]} is in {self._cache}")
        began = time.monotonic()
        with Progress(nbytes, self._say) as progress:
            snapshot_download(
                plan.model.repository,
                revision=commit,
                endpoint=self._endpoint,
                cache_dir=self._cache,
                allow_patterns=[glob.escape(name) for name in plan.wanted],
                tqdm_class=progress.bars,
            )
        if plan.missing:
            seconds = time.monotonic() - began
            self._say(f"{plan.model}: fetched in {seconds:.1f} s, {size(nbytes / seconds)}/s")

    def _listed(self, model: HubModel, revision: str) -> tuple[str, list[RemoteFile]]:
        """The commit of a revision, and its files. Raises the library's errors."""
        try:
            info = self._api.model_info(
                model.repository, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise FetchFailed(f"{model}: what answers at {self._endpoint} is no hub; HF_ENDPOINT names it") from None
        return str(info.sha), [
            RemoteFile(each.rfilename, each.size or 0, (each.lfs.sha256 if each.lfs else each.blob_id) or "")
            for each in info.siblings or ()
        ]

    def _from_cache(self, model: HubModel, unreachable: Exception) -> Path:
        """The folder of a model that the cache has whole, as far as the cache knows. Raises the library's errors."""

        def there(patterns: Sequence[str]) -> Path:
            return Path(
                snapshot_download(
                    model.repository,
                    revision=model.revision,
                    cache_dir=self._cache,
                    local_files_only=True,
                    allow_patterns=list(patterns),
                )
            )

        try:
            folder = there(())
            listed = get_cached_repo_tree(model.repository, revision=model.revision, cache_dir=self._cache)
            there([glob.escape(name) for name in files.of_model([each.path for each in listed], _shards(folder))])
        except CachedRepoTreeNotFoundError:
            pass  # an older library has fetched it
        except OSError as error:
            raise error from unreachable
        return folder

    def _one(self, model: HubModel, name: str, revision: str) -> Path:
        return Path(
            hf_hub_download(
                model.repository,
                name,
                revision=revision,
                endpoint=self._endpoint,
                cache_dir=self._cache,
                tqdm_class=silent_tqdm,
            )
        )

    def _is_cached(self, model: HubModel, folder: Path, file: RemoteFile) -> bool:
        blobs = self._cache / repo_folder_name(repo_id=model.repository, repo_type="model") / "blobs"
        return (folder / file.path).exists() or (file.blob != "" and (blobs / file.blob).exists())

    def _check_space(self, plans: Sequence[FetchPlan]) -> None:
        """Raises FetchFailed if the disk of the cache has no room for what is missing of all models."""
        place = self._cache.absolute()
        while not place.exists():
            place = place.parent
        nbytes, free = sum(plan.nbytes for plan in plans), shutil.disk_usage(place).free
        if nbytes > free:
            names = ", ".join(str(plan.model) for plan in plans if plan.missing)
            raise FetchFailed(
                f"{names}: {size(nbytes)} are to be fetched, and the disk of {self._cache} has {size(free)} free; "
                "HF_HOME names another place"
            )

    def _hint(self, model: HubModel) -> str:
        """Models of the hub whose names are alike, for a name that is not there; empty if the hub knows none."""
        wanted = model.repository.partition("/")[2]
        try:
            found = [each.id for each in self._api.list_models(search=wanted, limit=_HINTS)]
        except faults.EXPECTED:
            return ""
        return f". It has {', '.join(found)}" if found else ""


def _shards(folder: Path) -> Collection[str]:
    """The files of weights that a folder's index names. Raises BrokenCheckpoint."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
        return {str(name) for name in index["weight_map"].values()}
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError, KeyError, AttributeError):
        raise BrokenCheckpoint(f"{INDEX}: no weight_map of tensor names to file names") from None


def _version() -> str | None:
    try:
        return importlib.metadata.version("prism-serve")
    except importlib.metadata.PackageNotFoundError:
        return None
