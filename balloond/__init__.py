"""balloond owns every byte of a node's managed device memory.

device      a named budget of memory: a GPU, or on a machine without one a number of bytes of host memory ("cpu:0")
page        the unit of accounting of a device, a constant of its backend: 2 MiB on CUDA, 64 KiB on the CPU
extent      one allocation of a whole number of pages with one descriptor: granted, mapped, unmapped and returned
            whole; it never changes hands: what is returned is destroyed, what is granted is new and zero
lease       what one process holds of one device; it ends when the process detaches or is dead; a closed socket
            suspends it
token       the secret by which a process takes its lease up again, from this balloond or its successor
booking     what is not elastic of a model on a device (quota), and what it is entitled to (weights, floor)
limit       the most bytes of KV that a model may hold on a device; carries a revision
reserve     extents that an engine has mapped and does not use yet
claim       a growth or a room that waits until others have given back
room        free bytes that are held for one model for a while
spare       an extent made ahead of need: it belongs to no lease and is set aside from what the ledger gives out
stranded    an extent whose descriptor is lost while an engine that has it lives

The path of a page: an engine's driver asks (`driver/connection/lease.py`), `wire/handoff.py` receives,
`policy/device.py` decides and books, `node/daemon.py` has the backend create the extent and the keeper record it, the
handoff sends the descriptor, and the driver maps it (`driver/kv/range.py`). Back: the driver unmaps and returns, the
ledger frees, the descriptors close.

balloond may die at any time: engines run on, the keeper holds a descriptor and a record of everything, and the next
balloond rebuilds its ledger from those (`node/recovery.py`).
"""
