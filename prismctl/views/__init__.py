"""The views: what was seen of a system, as values and as text: tables, frames, sentences. Pure."""
