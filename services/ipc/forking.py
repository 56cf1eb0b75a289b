"""Turns gRPC's fork handlers off, for processes that start children while gRPC is in use: gpu_schedulers (engines), the
local launcher, tests.

gRPC restarts its threads in a forked child. A child on its way to exec has had its descriptors closed, so such a thread
may find its own gone and abort the child before exec (seen once in some hundred starts under load). No process of Prism
forks without exec, so the handlers go. This module has to be imported before anything imports grpc, which reads the
variable then.
"""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
