"""Pure accounting of an engine's KV memory: no torch, no clock, no I/O."""
