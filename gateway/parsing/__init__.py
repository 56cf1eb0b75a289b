"""Taking answers apart: reasoning, calls of tools, and text. SGLang's own parsers do it, in a process beside the
gateway.

process    the process, and lines to it and back
parsers    which parsers a model's answers need, and one answer that is taken apart
"""
