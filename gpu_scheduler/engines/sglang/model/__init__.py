"""One model in an engine: built, proven, measured, put to sleep and woken; its requests and their outputs."""
