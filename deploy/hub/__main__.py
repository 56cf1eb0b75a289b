"""`prism fetch`: fetches models and adapters (LoRA) of the Hugging Face hub ahead of serving, checks them, and prints
their folders.

HF_HOME names the place, HF_TOKEN opens models that are gated, HF_ENDPOINT names another hub, HF_HUB_OFFLINE=1 keeps to
what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
from types import FrameType

from deploy.hub import names
from services.errors import Invalid, PrismError

_FLOAT_BYTES = {"cpu": 4, "cuda": 2}
_UNFINISHED = ".incomplete"
"""End of the names that the library gives to files that are not whole yet."""
_MOST_DESCRIPTORS = 4096
"""Descriptors that are looked at for unfinished files; a download has some dozens."""
_INTERRUPTED = 130


def say(text: str) -> None:
    print(f"prism: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None, prog: str = "python -m deploy.hub") -> int:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="ORG/NAME[@REVISION]")
    parser.add_argument(
        "--device", choices=tuple(_FLOAT_BYTES), default="cpu", help="where it will be served (default %(default)s)"
    )
    parser.add_argument(
        "--unverified", action="store_true", help="also of a class that nobody has compared with another implementation"
    )
    parser.add_argument("--unverified-model", action="append", default=[], metavar="ORG/NAME", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    models = []
    for text in options.models:
        try:
            model = names.parse(text)
        except Invalid as error:
            parser.error(str(error))
        if model is None:
            parser.error(f"{text!r} is not the name of a model: write ORG/NAME")
        models.append(model)
    unverified = {model for model in models if options.unverified or str(model) in options.unverified_model}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stopped)
    # It takes a second, and the help needs none of it.
    from huggingface_hub.utils import logging

    from deploy.hub.fetching import Hub

    logging.set_verbosity_error()
    try:
        # `prism serve` has no base for an adapter.
        for folder in Hub(say, adapters=not options.whole).fetch(
            models, _FLOAT_BYTES[options.device], unverified=unverified
        ):
            print(folder, flush=True)
    except PrismError as error:
        say(str(error))
        return 1
    return 0


def _stopped(number: int, frame: FrameType | None) -> None:
    """Ends the process at once, also while threads wait for the network. Removes what they have begun, which no other
    process can go on with."""
    # No thread opens another file from here on.
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    for descriptor in range(min(most, _MOST_DESCRIPTORS)):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path.endswith(_UNFINISHED):
                os.unlink(path)
    if sys.stderr.isatty():
        print(file=sys.stderr)  # behind the bar, and what a terminal shows of Ctrl-C
    say("stopped; files that are complete stay for the next time")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
