"""`prism`: many large language models from one pool of GPU memory."""

from __future__ import annotations

import argparse
import os
import sys

_COMMANDS = {
    "serve": "serve models, until Ctrl-C: prism serve Qwen/Qwen3-0.6B ./my-model",
    "fetch": "fetch models from the Hugging Face hub, to be served later or without a network",
    "config": "a node in one file, prism.toml: check it, render the files of systemd, compose or Kubernetes",
    "install": "install the engine's packages for this machine: prism install cpu, prism install cuda",
}

_INTERRUPTED = 130
_UNREAD = 141
"""Exit status of a command whose output nobody reads to its end, as with `| head`: that of one that SIGPIPE kills."""


def main() -> int:
    try:
        return _main()
    except KeyboardInterrupt:  # while a command is imported, for instance
        print("prism: stopped", file=sys.stderr, flush=True)
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it flushes at its end
        return _UNREAD


def _main() -> int:
    import importlib.metadata  # takes longer than all else here, and Ctrl-C may come meanwhile

    # What is started from here imports this package, not files in the folder where the user happens to be.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    parser = argparse.ArgumentParser(
        prog="prism",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "".join(f"  {name:<9}{what}\n" for name, what in _COMMANDS.items())
        + "\nprism COMMAND --help says more; prismctl looks at a system that runs.",
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("prism-serve"))
    parser.add_argument("command", choices=tuple(_COMMANDS), metavar="COMMAND")
    command = parser.parse_args(sys.argv[1:2]).command
    rest, prog = sys.argv[2:], f"prism {command}"
    # Each is imported when it is needed, so that `prism --help` answers at once.
    if command == "install":
        from deploy import engine_packages

        return engine_packages.main(rest, prog)
    if command == "fetch":
        from deploy.hub import __main__ as hub

        return hub.main(rest, prog)
    if command == "config":
        from deploy import config

        return config.main(rest, prog)
    from deploy.local import __main__ as local

    return local.run(rest, prog)


if __name__ == "__main__":
    sys.exit(main())
