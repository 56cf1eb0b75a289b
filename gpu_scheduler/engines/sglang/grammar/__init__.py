"""Grammars of structured answers: compiled for the engine, and tried in a process that may die of them."""
