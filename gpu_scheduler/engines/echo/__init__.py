"""An engine without a model, for tests and benchmarks that need speed: its "model" repeats the last tokens that it has
read.

It speaks the same protocol, holds memory through the same driver and keeps the same residencies as the SGLang engine,
so everything around an engine can be tried with it in milliseconds. The next token depends on nothing but the tokens
before it, as with a real model at temperature 0: a stream that is resumed elsewhere goes on with the same tokens.
"""

OPTIONS = frozenset({"step_ms", "prefill_tokens_per_s", "kept_bytes"})
"""Options of a Load that the echo engine takes (`engine`)."""
