"""The KV range: addresses that never change, and extents that come and go behind them.

range       the range, as an engine uses it
reports     what balloond hears of its use

What `range` does is decided in pure modules:

growth      what is requested, and what goes back
watermarks  how much is kept ahead of need
reserve     which indices are taken first, and which leave
reclaims    the books of what balloond wants back
address_map the books of what lies where
"""
