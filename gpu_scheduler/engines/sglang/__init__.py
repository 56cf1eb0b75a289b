"""The SGLang engine: one process, one model at a time; SGLang unmodified, steered through its own plugin entry point.

Words: an *envelope* is one page of SGLang's pool with all layers' K and V of its tokens; an *extent* is what is mapped
and unmapped whole; *held* extents are this engine's to use, *empty* ones have no live envelope on them.

A model:
1. `__main__` prepares the environment, lets SGLang load its plugins and checks that every hook took (`plugin`).
2. `engine` is warm: it waits for a Load, opens the model's memory (`memory`, `on_balloond`) and an `instance`.
3. `instance` builds SGLang's Scheduler. Its loader (`loader`) reads the checkpoint, or nothing at all when an image
   will come; the parameters go into the weights range as they are made (`weights`). The pool (`pool`) makes the KV
   range.
4. SGLang's own event loop runs. A request of the engine's own (`probe`) proves the model, and it is active.
5. Residency commands (`commands`, `residency`) are acted on between two steps. Unload leaves the loop, and the
   process is warm again.

A request:
1. Where SGLang reads its sockets, `hooks_loop` calls `loop.pull`: messages become SGLang's requests (`requests`).
2. Before SGLang admits one, `admission` sees to it that there is memory: free, grown, or evicted (`eviction`).
3. `allocator`, or `paged_allocator`, hands out the lowest free envelopes (`policy.envelopes`, `kv`); their numbers
   travel between host and device through `ids`.
4. A step's tokens leave in one message (`outputs`).
5. When memory has to go, `loop` evicts cached prefixes by extents, then retracts running requests (`retraction`).
   One that nothing can make room for goes back into the shared queue.
6. Once nothing runs, what is left of the prefixes is moved together (`compaction`).
7. When the model moves to another device, the KV of what runs goes along as prefixes (`moving`).

On a GPU the same with other parts: `options` has SGLang's arguments for either, `pool` both layouts (`rows` for
storing), `device` what a process keeps of a GPU, `quota` how much that may be, `graph_memory` what of it leaves while
the model sleeps. `kernels` tells of what is compiled, and `precompile`, a process beside the engines, compiles the
longest before they need it. What must not pass from one model to the next is in `forget`.
"""
