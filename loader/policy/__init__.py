"""Decisions of the loader: how a copy is cut, and which images give way. Pure: values in, values out."""
