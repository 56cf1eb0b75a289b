"""The whole system on one machine, for a person at a terminal: `make serve`.

topology        which processes, with which configuration files
processes       start, wait until healthy, restart what dies, end all
models          a catalogue of the folders that the person names
bundled         models that a word stands for instead of a folder, and smollm2/, which makes one
sizing          memory of CPU devices, from what the models need
devices         what this machine has
warming         what engines are at before the first can take a model
kernels         what GPUs' engines compile: where it is kept, and compiled before a request needs it
introduction    what runs where, and what to try
questions       what to ask a model of
__main__        the command line
"""

import services.ipc.forking  # noqa: F401  (before grpc: this process starts all others)
