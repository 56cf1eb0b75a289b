"""Pure accounting of an engine's KV memory, and other decisions that need no torch, no clock and no I/O.

envelopes, layout, places       KV blocks (envelopes) and the extents that they lie on
compaction                      which live blocks to move together
agreement                       the facts that the ranks of one engine agree on before a step
quota                           device memory booked for the process itself
grammar                         which grammars are refused, and which have become too slow
rope, jit                       SGLang's arguments and kernels, from a model's config.json
spans                           which bytes of a weights range are taken
kept, ring                      a cache bounded by bytes; places in a ring buffer
"""
