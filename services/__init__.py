"""The chassis that every process of Prism stands on: start, be healthy, drain, stop, configure, log, measure, talk.

It knows no word of the domain: nothing here says model, page or queue.

    runtime/    one process: build, ready, drain, stop (service); configuration, tasks, files that change
    rpc/        gRPC servers and channels, TLS, addresses; state that others follow
    ipc/        Unix sockets, framed messages, descriptors; child processes
    telemetry/  logs, metrics, traces
    wording/    counts, paths and values as people read them
    errors      domain errors; `services.rpc.status` has the table between them and gRPC status codes
"""

import os

# gRPC's core writes its own lines, which are no JSON, to the standard error output of any process that imports it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
