"""For processes that start children while gRPC is in use: gpu_schedulers (engines), the local launcher, tests.

gRPC restarts its threads in a forked child. A child on its way to exec has had its descriptors closed, so such a
thread may find its own gone and abort the child before it became what it was to be (seen once in some hundred starts
under load). Nothing of ours forks without exec, so the handlers go. Import this before anything imports grpc:
it is read then.
"""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
