"""The whole system on one machine, for a person at a terminal: `make serve`.

topology    which processes, with which configuration files
processes   start, wait until healthy, restart what dies, end all
__main__    the command line, and what the person sees
"""

import services.forking  # noqa: F401  (before grpc: this process starts all others)
