"""Tools that a model may call: what a request says of them, the grammar that makes it call one, and calls found in its
answer. No I/O."""
