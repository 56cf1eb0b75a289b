"""Start of processes in the tests of benchmarks: services and engines are forks of a process that has their modules."""

import services.ipc.forking  # noqa: F401  (before grpc: tests start processes)

from hypothesis import HealthCheck, settings  # isort: skip

from testing import zygote  # isort: skip

zygote.install()

# No test fails for being slow: machines are.
settings.register_profile("prism", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prism")
