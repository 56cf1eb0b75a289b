"""The service that decides which model lives where in a cluster: activation, eviction, migration.

It keeps no state that it cannot rebuild from what the nodes report, beside a file of the traffic of earlier hours,
without which it only begins worse informed. While it is away, everything keeps serving.

    pressure   KV pressure ratio (KVPR): SLO-weighted KV demand per second over the KV memory that a device has left
    group      the 1, 2, 4 or 8 GPUs that serve one model instance together
    active, hibernating, cold, on disk   the four residencies of a model

`policy/` decides and is pure; everything else carries decisions out.
"""
