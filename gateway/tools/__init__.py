"""Tools that a model may call: what a request says of them, the grammar that makes a model call one, and finding calls
in an answer. No I/O."""
