"""`python -m deploy.local.smollm2`: makes the folder of SmolLM2 where it is not there yet, and prints its path."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from deploy.local.smollm2 import folder
from services.errors import PrismError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.local.smollm2", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=folder.FOLDER, help="where it is to be (default %(default)s)"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is half made is removed on the way out

    def say(text: str) -> None:
        print(f"prism: smollm2: {text}", file=sys.stderr, flush=True)

    try:
        folder.make(options.folder.resolve(), say)
    except (PrismError, OSError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    print(options.folder.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
