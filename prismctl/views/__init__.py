"""What was seen, as values and as text: tables, frames, sentences. Pure."""
