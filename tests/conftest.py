"""For all tests."""

import services.forking  # noqa: F401  (before grpc: tests start processes)
