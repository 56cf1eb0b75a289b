"""Device and host memory of one model: its lease with balloond, its address ranges, and the memory of its CUDA graphs.

ranges              protocols of balloond's driver, as far as the engine uses it model_memory        the lease and the
ranges of one model on_balloond         the driver: ranges on a lease with balloond shared_range        the KV range of
an engine with several ranks graph_memory        memory of CUDA graphs, which leaves while the model sleeps host_buffer
pinned host memory that weights are copied from
"""
