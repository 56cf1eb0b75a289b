"""Configuration of a loader."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from services.runtime.config import Config
from services.wording.addresses import SocketPath


class LoaderConfig(Config):
    """One node's loader."""

    catalogue: str
    """The operator's file of models (loader/catalogue/catalogue.py)."""
    keeper: SocketPath
    """Path of the keeper's SEQPACKET socket."""
    handoff: SocketPath
    """Path of balloond's SEQPACKET socket."""
    host_capacity_bytes: int = Field(gt=0)
    """Most that weight images may take of the host's memory."""
    device_dtype_bytes: Literal[2, 4] = 4
    """Of weights and KV as engines hold them: 4 (float32) on the CPU, 2 on GPUs."""
    kv_extent_bytes: int = Field(default=256 << 10, gt=0)
    """Floors are whole extents of this size: that of the engines (`engines.kv_extent_bytes` of the gpu_schedulers)."""
    engine_quota_bytes: int = Field(default=1 << 20, ge=0)
    """Private memory of an engine on its device, for models whose catalogue entry gives no `quota_bytes`."""
    chunk_bytes: int = Field(default=32 << 20, ge=4096, multiple_of=4096)
    """What a link takes at a time, four times as much between devices: links share a copy, and a cancellation is
    noticed, in such steps. A GPU is given it in copies of at most 8 MiB. Below a few MiB the steps' own cost shows;
    more than 48 MiB leave a GPU's link without work between two."""
    copy_devices: list[str] = []
    """Devices whose links may also carry what goes to others, where the hardware has a way: "cuda:0", "cuda:1", ... The
    loader takes some hundred MiB of each GPU whose link it uses. None: every device has its own link only."""
    copy_threads: int = Field(default=8, ge=1)
    """Copies that run at the same time; more wait for their turn. The ranks of a model are loaded at once."""
    disk_folder: str = ""
    """Where images are kept on local disk as well, to come back from there after a restart of the host or when they
    had to leave its memory; this loader's alone. Empty: they are not."""
    disk_capacity_bytes: int = Field(default=0, ge=0)
    """Most that they may take there."""
    disk_threads: int = Field(default=4, ge=1)
    """That read or write one file."""
    answer_timeout_s: float = Field(default=20.0, gt=0)
    """How long a call waits for the keeper or balloond while they are away (a restart takes a second or two)."""

    @model_validator(mode="after")
    def _a_folder_has_a_capacity(self) -> LoaderConfig:
        if bool(self.disk_folder) != bool(self.disk_capacity_bytes):
            raise ValueError("disk_folder and disk_capacity_bytes go together")
        return self
