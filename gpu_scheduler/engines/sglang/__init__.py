"""The SGLang engine: one process, one model at a time, SGLang unmodified and steered through its own plugin entry
point.

A process starts warm (imports done), takes a model (`residency`), builds SGLang's Scheduler in its main thread and
runs SGLang's own event loop; the loop reads this project's channel instead of SGLang's sockets (`hooks_loop`, `turns
of the loop` in `loop`). The KV cache lives in an elastic range (`pool`, `allocator`, `policy.envelopes`), the
parameters in a weights range (`weights`), both handed out by balloond.

Words: an *envelope* is one slot of SGLang's pool with all layers' K and V; an *extent* is what is mapped and
unmapped whole.
"""
