"""Start of processes in the tests of benchmarks: services and engines are forks of a process that has their modules."""

import services.ipc.forking  # noqa: F401  (before grpc: tests start processes)

from testing import zygote  # isort: skip

zygote.install()
