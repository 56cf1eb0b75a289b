"""The whole system on one machine, for a person at a terminal: `prism serve`, `make serve`.

topology        which processes, with which configuration files
processes       start, wait until healthy, restart what dies, end all
models          a catalogue of the folders that the person names
hub_models      models of the Hugging Face hub among them, which are fetched first
bundled         models that a word stands for instead of a folder, and smollm2/, which makes one
sizing          memory of CPU devices, from what the models need
devices         devices and host memory of this machine
warming         reports what engines are doing until the first can take a model
kernels         kernels of GPUs' engines: where they are kept, and compiling them before a request needs them
introduction    what runs where, and what to try
__main__        the command line
"""

import services.ipc.forking  # noqa: F401  (before grpc: this process starts all others)
