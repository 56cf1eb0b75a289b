"""The whole system on one machine, for a person at a terminal: `make serve`.

bundled     models that a word stands for instead of a folder, and smollm2/, which makes one
sizing      memory of CPU devices, from what the models need
kernels     what GPUs' engines compile: where it is kept, and compiled before a request needs it
topology    which processes, with which configuration files
processes   start, wait until healthy, restart what dies, end all
__main__    the command line, and what the person sees
"""

import services.forking  # noqa: F401  (before grpc: this process starts all others)
