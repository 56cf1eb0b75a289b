"""The service that arbitrates one group: a fixed set of GPUs, one, or those that serve tensor-parallel models together.

It owns the shared request queue of all models of the group, the engine processes, and residency changes on the group.
It orders requests by the time they have left, bounds how much prefill work of its engines runs side by side, and is the
only service that sets the limits of its devices' leases.

    slack    the time between now and the latest start that still meets a request's TTFT target
    limit    the most bytes of KV that a model may hold on a device
    floor    the least bytes of KV that a model may hold on a device
    group    the 1, 2 or 4 GPUs that serve one model instance together

`policy/` decides and is pure; everything else carries decisions out.
"""

import services.ipc.forking  # noqa: F401  (before grpc is imported, because this process starts engines)
