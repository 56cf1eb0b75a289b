"""The loader of a node: which models there are, what their checkpoints need, and their weights in memory and on disk.

    catalogue    the operator's file: models by name, where they lie, what they may expect
    checkpoint   a Hugging Face folder, of which only headers are read: what its model needs, or why it cannot be served
    image        the bytes of a model's weights range as its engine laid them out, in shared host memory, with the
                 manifest that says what lies where. The keeper holds its descriptor too: a loader that dies loses none
    disk         images as files: written once they are made, read when host memory has none
    job          a save, a load or a read under way, which several callers may follow
    copy         extents borrowed from balloond -> image (save), image -> extents (load), or from one lease's extents to
                 another's (load from a device), chunk by chunk, in a thread
    source       a lease that is known to hold the bytes of an image

An image belongs to one generation of a checkpoint and to one manifest; engines exchange it only when both are equal.
Its checksum (`services.runtime.checksum`) is that of the range's bytes [0, total_bytes) of the manifest, computed by
the engine over its range and by the loader over what it copied. The extents of a lease, by ascending id, are the
range's bytes back to back; past `total_bytes` there is padding only.
"""

import services.ipc.forking  # noqa: F401  (before grpc: this process starts the one that tries tokenizers)
