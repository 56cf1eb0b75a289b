"""What every other room of the SGLang engine builds on: options of a Load, states, errors, the process and its device.

errors, faults      why a command failed, and whose fault it was
states              the states of an engine process, and which command may come in which
options             settings of one Load, and SGLang's arguments made from them
environment         what has to be set before SGLang and torch are imported
current             the model instance of this process, for hooks
device              what differs between host and GPU outside SGLang
request_table       the requests that this engine has
kernels, collector, stalls      pauses of the process: Triton's compiler, Python's collector, and where it hangs
"""
