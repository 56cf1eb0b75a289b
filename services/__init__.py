"""The chassis that every process of Prism stands on: start, be healthy, drain, stop, configure, log, measure, talk.

It knows no word of the domain: nothing here says model, page or queue. Each module is one habit:

    config      one TOML file a service, checked by a schema (addresses in it: addresses)
    log         structlog, with what is bound to the current request
    errors      domain errors, and the one table between them and gRPC status codes
    rpc         gRPC servers (health, reflection) and channels
    service     one process: build, ready, drain, stop
    notify      telling a service manager how the process is
    forking     children without gRPC's fork handlers
    tasks       background tasks that are named, kept and whose failure is seen
    watch       state that others follow, and following others' streams
    metrics     Prometheus text
    tracing     spans of requests (spans), to OpenTelemetry when that is on (otlp)
    framing     protobuf frames on a stream socket
    seqpacket   datagrams with descriptors on a SEQPACKET socket
"""

import os

# gRPC's core writes its own lines, which are no JSON, to the standard error output of whoever imports it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
