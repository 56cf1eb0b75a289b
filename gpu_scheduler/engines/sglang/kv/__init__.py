"""KV memory of one model: an elastic range, what makes room in it, and the prefix cache.

engine_kv                       all kinds of KV of the model, over one range
elastic_kv                      the addresses of one kind, and the accounting of its KV blocks
pools                           SGLang's pools and allocators over the range
slot_transfer                   numbers of KV blocks between the host and the device
provisioning                    memory for tokens that SGLang is about to allocate
state_provisioning              memory for states, and where prompts are cut to cache one
prefix_tree                     SGLang's tree of cached prefixes, for all that reads or changes it
prefix_eviction, compaction     whole extents emptied, by evicting or moving KV blocks
kv_transfer                     KV of running requests, to and from engines on other devices
"""
