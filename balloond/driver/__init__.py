"""balloond's driver, inside the processes that use memory: engines' leases and ranges.

connection  the lease, and how it speaks with balloond
kv          the KV range and the reserve of extents behind it
weights     the weights range
pieces      memory that is handed out piece by piece, for CUDA graphs
tensor      torch tensors over addresses
allocator   settings of torch's own allocator that do not go together with ranges
private     memory that the process takes beside its leases

The code blocks, on a thread of its own for each lease: an engine's main thread runs forward passes.
"""
