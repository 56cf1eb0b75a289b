"""JSON Schema as grammars: what a schema allows is written down as a grammar that allows nothing else, or the schema is
refused by the keyword that no grammar here keeps. No I/O.

`numbers`, `patterns` and `formats` make regular languages (`languages`) of what a schema says of numbers and strings;
`documents` finds its way in a schema, `reader` brings together what several places of it say of one value (`term`) and
keeps branches `apart`, and `grammar` writes the rules.
"""
