"""The foundation of every other room of the SGLang engine: options of a Load, states, errors, the process and its
device.

errors, faults      why a command failed, and whether the model, the host or the command is at fault
states              the states of an engine process, and which command may come in which
options             settings of one Load, and SGLang's arguments made from them
environment         what has to be set before SGLang and torch are imported
current             the model of this process, for hooks
device              what differs between host and GPU outside SGLang
request_table       the requests that this engine has
kernels             kernels compiled at run time (Triton, nvcc), and reports of each compilation
collector           pauses of Python's garbage collector
stalls              stack traces of an engine that stands still
"""
