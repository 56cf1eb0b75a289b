"""Hooks on SGLang's internals, one file a subject. `plugin.py` registers them."""
