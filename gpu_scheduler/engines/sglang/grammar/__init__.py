"""Grammars of structured answers: compiled for the engine, and tried in a process that may die of them.

grammars        SGLang's grammar backend for this engine
compiling       one grammar, compiled by xgrammar
sandbox         a process that tries grammars before an engine gets them
"""
