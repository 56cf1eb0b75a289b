"""KV memory of one model: SGLang's pools and allocators over an elastic range, and what makes room in it.

elastic_kv                      the range and the accounting of its KV blocks
pool, kv_rows                   SGLang's KV pools as views over the range
allocator, paged_allocator      SGLang's token allocators over the range
slot_transfer                   numbers of KV blocks between the host and the device
admission                       memory for what SGLang is about to allocate
eviction, compaction            whole extents emptied, by evicting or moving KV blocks
kv_transfer                     KV of running requests, to and from engines on other devices
"""
