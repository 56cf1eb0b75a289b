"""Configuration of a loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from services.runtime.config import Config
from services.wording.addresses import SocketPath


class LoaderConfig(Config):
    """Settings of one node's loader."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "copy_threads": "8 copies run at the same time",
        "disk_threads": "4 threads read or write one file",
    }

    catalogue: str
    """Path of the operator's file of models (loader/catalogue/catalogue.py)."""
    keeper: SocketPath
    """Path of the keeper's SEQPACKET socket."""
    handoff: SocketPath
    """Path of balloond's SEQPACKET socket."""
    host_capacity_bytes: int = Field(gt=0)
    """Most bytes of the host's memory that weight images may take."""
    device_dtype_bytes: Literal[2, 4] = 4
    """Bytes of each number in weights and KV as engines hold them: 4 (float32) on the CPU, 2 on GPUs."""
    kv_extent_bytes: int = Field(default=256 << 10, gt=0)
    """Bytes of an extent of the engines (`engines.kv_extent_bytes` of the gpu_schedulers): floors are whole extents."""
    engine_quota_bytes: int = Field(default=1 << 20, ge=0)
    """Bytes of private memory of an engine on its device, for models whose catalogue entry gives no `quota_bytes`."""
    chunk_bytes: int = Field(default=32 << 20, ge=4096, multiple_of=4096)
    """Bytes that a link takes at a time, four times as many between devices: links share a copy, and a cancellation is
    noticed, in such steps. A GPU is given them in copies of at most 8 MiB. Below a few MiB the steps' own cost shows;
    more than 48 MiB leave a GPU's link without work between two."""
    copy_devices: list[str] = []
    """Devices whose links may also carry what goes to others, where the hardware has a way: "cuda:0", "cuda:1", ... The
    loader takes some hundred MiB of each GPU whose link it uses. Empty: every device has its own link only."""
    disk_folder: str = ""
    """Folder where images are kept on local disk as well, to come back from there after a restart of the host or when
    they had to leave its memory; only this loader uses it. Empty: they are not kept on disk."""
    disk_capacity_bytes: int = Field(default=0, ge=0)
    """Most bytes that images may take on disk."""
    answer_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds that a call waits for the keeper or balloond while they are away (a restart takes a second or two)."""

    @model_validator(mode="after")
    def _a_folder_has_a_capacity(self) -> LoaderConfig:
        if bool(self.disk_folder) != bool(self.disk_capacity_bytes):
            raise ValueError("disk_folder and disk_capacity_bytes go together")
        return self
