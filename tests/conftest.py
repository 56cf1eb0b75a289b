"""For all tests."""

import services.forking  # noqa: F401  (before grpc: tests start processes)

from hypothesis import settings  # isort: skip

# No test fails for being slow: machines are.
settings.register_profile("prism", deadline=None)
settings.load_profile("prism")
