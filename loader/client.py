"""Client of a node's loader for other services. Every call raises the errors of `services.errors`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from protos import common_pb2, engine_pb2, loader_pb2, loader_pb2_grpc
from services.errors import PrismError, TimedOut, Unavailable
from services.rpc import rpc
from services.rpc.status import from_rpc
from services.rpc.watch import follow_stream

Progressed = Callable[[common_pb2.Progress], None]
TRIED_S = 600.0
"""Seconds for calls in which the loader tries a model's tokenizer and chat template. A trial may take minutes where the
disk is cold and busy, and waits for those of other models (`checkpoints/text_trials.py`)."""


class LoaderClient:
    """The loader at a gRPC address. While it restarts, calls wait for it up to their time."""

    def __init__(self, address: str, timeout_s: float = 30.0) -> None:
        """`timeout_s`: seconds for calls that only read headers, and within which the loader has to be there for those
        that try a model's text as well; copies take as long as they take."""
        self._address = address
        self._channel = rpc.channel(address)
        self._stub = loader_pb2_grpc.LoaderStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s

    async def close(self) -> None:
        await self._channel.close()

    def watch(self) -> AsyncIterator[loader_pb2.Catalogue | None]:
        """Yields the whole catalogue now and after every change, for ever, and None each time the loader was lost."""
        return follow_stream(lambda: self._stub.Watch(loader_pb2.WatchRequest()), "catalogue")

    async def catalogue(self) -> loader_pb2.Catalogue:
        """The whole catalogue as it is now."""
        call = self._stub.Watch(loader_pb2.WatchRequest())
        try:
            catalogue: loader_pb2.Catalogue = await call.read()
            return catalogue
        except grpc.aio.AioRpcError as error:
            raise self._told(error) from None
        finally:
            call.cancel()

    async def inspect(self, listing: common_pb2.ModelListing) -> common_pb2.ModelSpec:
        """The model that adding `listing` would give; nothing changes. Raises Unmet with the reason when the checkpoint
        is broken, Invalid for a listing that makes no sense, such as a relative path."""
        answer = await self._call_tried(self._stub.Inspect, loader_pb2.InspectRequest(model=listing), again=True)
        return answer.model  # type: ignore[no-any-return]

    async def state(self, name: str) -> loader_pb2.Inspection:
        """The state of a model of the catalogue: its checkpoint as it is now, its images, and what is under way for it.
        Raises NotFound, and Unmet when the checkpoint is broken."""
        request = loader_pb2.InspectRequest(model=common_pb2.ModelListing(name=name))
        return await self._call_tried(self._stub.Inspect, request, again=True)  # type: ignore[no-any-return]

    async def look(
        self, name: str, *, thorough: bool = False, refused: bool = False, timeout_s: float | None = None
    ) -> loader_pb2.LookResponse:
        """A model of the catalogue as its files are now; they are read again where they are not what they were, and
        with `thorough` in any case. `refused`: an engine could not use them, and it was their fault. Raises
        NotFound."""
        request = loader_pb2.LookRequest(model=name, thorough=thorough, refused=refused)
        if timeout_s is None:
            return await self._call_tried(self._stub.Look, request, again=True)  # type: ignore[no-any-return]
        return await self._call(self._stub.Look, request, again=True, timeout_s=timeout_s)  # type: ignore[no-any-return]

    async def add(self, listing: common_pb2.ModelListing, change: int = 0) -> common_pb2.ModelSpec:
        """Adds a model; `change` is the number that placement gave to this change. Raises Exists when the name has
        another path, and what `inspect` raises."""
        request = loader_pb2.AddRequest(model=listing, change=change)
        return await self._call_tried(self._stub.Add, request)  # type: ignore[no-any-return]

    async def register(
        self, listing: common_pb2.ModelListing, *, prefetch: bool = False, on_progress: Progressed | None = None
    ) -> common_pb2.ModelSpec:
        """Adds a model and makes ready what can be: with `prefetch`, or when it is pinned, its image is read from disk
        into host memory. Raises what `add` does, and Refused when host memory is short: the model is added then."""
        request = loader_pb2.RegisterRequest(model=listing, prefetch=prefetch)
        spec = common_pb2.ModelSpec()
        async for message in self._messages(self._stub.Register(request)):
            if message.HasField("model"):
                spec = message.model
            elif on_progress is not None:
                on_progress(message.progress)
        return spec

    async def remove(self, name: str, change: int = 0) -> None:
        """Removes a model. `change`: number of this change, as in `add`; it is kept even if the model is not there.
        Raises NotFound."""
        await self._call(self._stub.Remove, loader_pb2.RemoveRequest(name=name, change=change))

    async def save_image(
        self,
        model: str,
        generation: int,
        lease_id: str,
        manifest: bytes,
        checksum: str = "",
        *,
        rank: int = 0,
        on_progress: Progressed | None = None,
    ) -> loader_pb2.ImageProgress:
        """Copies the weights of a lease into an image. Returns the last message: `checksum` and `image_bytes` of the
        image. Cancelling drops a partial image. Raises Unmet (other generation, other checksum), NotFound (model,
        lease), Refused (host memory)."""
        request = loader_pb2.SaveImageRequest(
            model=model, generation=generation, lease_id=lease_id, manifest=manifest, checksum=checksum, rank=rank
        )
        return await self._last(self._stub.SaveImage(request), on_progress)

    async def load_image(
        self,
        model: str,
        generation: int,
        lease_id: str,
        manifest: bytes,
        *,
        rank: int = 0,
        image_only: bool = False,
        on_progress: Progressed | None = None,
    ) -> loader_pb2.ImageProgress:
        """Fills the weights of a lease. Returns the last message once they are the image's; its `source` says where
        they came from. `image_only`: they do not come from another lease, because what that gave did not verify. Raises
        Unmet when there is no image like that, NotFound when the lease is gone, Conflict when a caller cancelled it."""
        request = loader_pb2.LoadImageRequest(
            model=model,
            generation=generation,
            lease_id=lease_id,
            manifest=manifest,
            rank=rank,
            image_only=image_only,
        )
        return await self._last(self._stub.LoadImage(request), on_progress)

    async def drop_image(self, model: str, *, from_disk: bool = False) -> None:
        """Frees the host memory of a model's image, and with `from_disk` its file too. Idempotent."""
        await self._call(
            self._stub.DropImage, loader_pb2.DropImageRequest(model=model, from_disk=from_disk), again=True
        )

    async def copy_kv(self, source: engine_pb2.KvPlaces, target: engine_pb2.KvPlaces) -> int:
        """Fills the target's places from the source's and returns the bytes copied. Raises NotFound (lease, extent),
        Unmet (no way between the devices)."""
        request = loader_pb2.CopyKvRequest(source=source, target=target)
        return int((await self._call(self._stub.CopyKv, request)).bytes)

    async def cancel(self, model: str, lease_id: str = "") -> int:
        """Ends the saves, loads and reads of a model, or of one lease of it; returns how many, once they have
        ended."""
        request = loader_pb2.CancelRequest(model=model, lease_id=lease_id)
        return int((await self._call(self._stub.Cancel, request)).ended)

    async def pin(self, model: str) -> None:
        """Pins a model: its image gives way to no other. Idempotent. Raises NotFound, and Refused with the arithmetic
        for a model that can have no image beside those that are pinned."""
        await self._call(self._stub.Pin, loader_pb2.PinRequest(model=model), again=True)

    async def unpin(self, model: str) -> None:
        """Takes the pin of a model back. Idempotent. Raises NotFound, and Unmet for a model that is listed as
        pinned."""
        await self._call(self._stub.Unpin, loader_pb2.UnpinRequest(model=model), again=True)

    async def _call(self, method: Any, request: Any, again: bool = False, timeout_s: float | None = None) -> Any:
        """Makes a call. `again`: it may be made twice. `timeout_s`: seconds for this call, if not those of all."""
        try:
            return await rpc.answer(method, request, self._timeout_s if timeout_s is None else timeout_s, again)
        except grpc.aio.AioRpcError as error:
            raise self._told(error) from None

    async def _call_tried(self, method: Any, request: Any, again: bool = False) -> Any:
        """Makes a call, as `_call` does, in which a model's text is tried."""
        try:
            return await rpc.answer(method, request, TRIED_S, again, self._is_there)
        except grpc.aio.AioRpcError as error:
            raise self._told(error) from None

    async def _is_there(self) -> None:
        """Returns once the loader is connected. Raises TimedOut."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            raise TimedOut(f"the loader at {self._address} did not answer in time") from None

    async def _last(self, stream: Any, on_progress: Progressed | None) -> loader_pb2.ImageProgress:
        """The message that has the image, as soon as it is here; how the call ends after that does not matter."""
        last = loader_pb2.ImageProgress()
        async with aclosing(self._messages(stream)) as messages:
            async for last in messages:
                if on_progress is not None:
                    on_progress(last.progress)
                if last.checksum:
                    break
        return last

    async def _messages(self, stream: Any) -> AsyncGenerator[Any, None]:
        """Yields the messages of a call, which ends with the iteration."""
        try:
            async for message in stream:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._told(error) from None
        finally:
            stream.cancel()

    def _told(self, error: grpc.aio.AioRpcError) -> PrismError:
        """The error that a caller gets. It names the loader, because clients are shown it and gRPC's text about a lost
        connection names no service."""
        whom = f"the loader at {self._address}"
        told = from_rpc(error, whom)
        return Unavailable(f"{whom}: {told}") if isinstance(told, Unavailable) else told
