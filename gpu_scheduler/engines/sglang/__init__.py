"""The SGLang engine: one process that serves one model at a time. SGLang is the stock wheel, steered by classes below
its own and by hooks on its internals (`hooks/`), which its own plugin entry point (`plugin.py`) puts in place.

Words: a *KV block* holds the K and V of all layers for one page of SGLang's tokens (the code says *envelope*); an
*extent* is mapped and unmapped as a whole; *held* extents are this engine's to use, *empty* ones hold no live block.

The rooms, each of which imports only those before it:

    base        options, states, errors, the process and its device
    policy      pure accounting
    ranks       the processes of one engine, and the socket to its gpu_scheduler
    memory      the lease, address ranges, memory of CUDA graphs
    kv          KV pools over the elastic range, and what makes room in it
    weights     the weights range, and the loaders that fill it
    sampling    the next token of each request
    grammar     structured answers
    model       one model: built, proven, measured, put to sleep, woken; requests and outputs
    step        what happens between two steps of SGLang's event loop
    hooks       where all of this takes hold in SGLang

How a model comes up:
1. `__main__` prepares the environment, lets SGLang load its plugins and checks that every hook took, and that SGLang
   has every method that a class of ours overrides.
2. `engine` is warm: it waits for a Load, opens the model's memory (`memory/on_balloond.py`) and makes a `LoadedModel`
   with its `Lifecycle`.
3. `model/lifecycle.py` builds SGLang's Scheduler, of the class in `hooks/scheduler.py`. Its loader
   (`weights/loader.py`) reads the checkpoint, or nothing where an image will come; parameters go into the weights range
   as they are made (`weights/weights_range.py`). `kv/pools/pool.py` makes the KV range.
4. SGLang's own event loop runs. The engine's own requests (`model/probe.py`) prove the model, and it is active.
5. Commands that load, hibernate, wake and unload a model (`step/commands.py`, `base/states.py`) are carried out between
   two steps. Unload leaves the loop, and the process is warm again; `model/teardown.py` removes what must not pass to
   the next model.

How a request is served:
1. Where SGLang reads its sockets, `hooks/scheduler.py` calls `StepLoop.pull`: messages become SGLang's requests
   (`model/requests.py`). The first one that names an adapter has its files read (`model/adapters.py`).
2. Before SGLang admits one, `kv/provisioning.py` makes sure that there is memory: free, grown, or evicted
   (`kv/prefix_eviction.py`).
3. `kv/pools/allocator.py`, or `kv/pools/paged_allocator.py`, hands out the lowest free KV blocks
   (`policy/envelopes.py`); their numbers travel between host and device through `kv/slot_transfer.py`.
4. The tokens of a step leave in one message (`model/outputs.py`).
5. When memory has to leave, `step/reclaim.py` evicts cached prefixes by extents, then retracts running requests
   (`step/retraction.py`). A request that no memory can be found for goes back into the shared queue.
6. Once nothing runs, prefixes that are left are moved together (`kv/compaction.py`).
7. When the model moves to another device, the KV of running requests goes along as prefixes (`kv/kv_transfer.py`).

SGLang's tree of cached prefixes is read and changed through `kv/prefix_tree.py` alone.

On a GPU SGLang gets other arguments (`base/options.py`). `base/device.py` and `model/quota.py` account for the GPU
memory that the process itself keeps, and `memory/graph_memory.py` for the part of it that leaves while the model
sleeps. `base/kernels.py` reports kernels that are compiled; `precompile.py`, a process beside the engines, compiles the
longest ones before they are needed.

`answer_parsers.py`, a process beside a gateway, takes answers apart with SGLang's parsers, with `json_calls.py` for
calls that are JSON.
"""
