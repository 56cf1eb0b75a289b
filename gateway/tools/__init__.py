"""Tools that a model may call: what a request says of them, and the grammars that hold an answer to them, or to a form,
from its beginning or from some place on. No I/O."""
