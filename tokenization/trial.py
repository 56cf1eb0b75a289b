"""`python -m tokenization.trial`: tries whether what a gateway and an engine need of a folder beside its weights can be
used: its tokenizer, its chat template, its config.json as transformers reads it.

It is a process of its own, which its parent may end: libraries in C++ and Rust may do anything with broken files, and
what was loaded is some hundred MiB. It reads a folder's path as JSON from each line of its input, and answers with a
line of JSON: why the folder cannot be used, empty when it can, and whether that may pass while the files stay as they
are.
"""

from __future__ import annotations

import json
import sys

from services.errors import Unmet
from tokenization import files, loading


def verdict(path: str) -> tuple[str, bool]:
    """(why the folder cannot be used, in one line without its path, or empty; whether that may pass)"""
    try:
        loading.check_config(path)
        loading.load(path)
    except Unmet as error:
        return str(error), isinstance(error, files.UnreadableNow)
    return "", False


def main() -> None:
    loading.without_torch()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(verdict(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
