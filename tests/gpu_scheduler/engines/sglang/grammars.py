"""Grammars that several tests ask for."""

SLOW = """root ::= r{0,3000}
r ::= s{0,3000}
s ::= ("a" | [a-z] | [a-y] | [ a-z] | [ a-x]){0,3000}"""
"""Slower with every token: what it allows can be read in ever more ways."""
