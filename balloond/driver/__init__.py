"""balloond's driver, inside the processes that use memory: engines' leases and ranges.

`lease` speaks with balloond, `range` keeps the KV addresses and a reserve of extents behind them, `weights` those of
the weights, `tensor` makes torch tensors over them. The code blocks, on a thread of its own for each lease: an engine's
main thread runs forward passes.

What `range` does is decided in pure modules: `growth` (what is requested, what goes back; `watermarks`: how much is
kept ahead), `reserve` (which indices are taken first, and which leave), `reclaims` and `address_map` keep the books.
"""
