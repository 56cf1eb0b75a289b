"""`sglang.bench_serving`, its imports done once: for the process that asks servers in `http_beside_sglang`.

    python -m benchmarks.gpu.bench_client TOKENIZER_FOLDER

Each line of its input is JSON: `arguments` of bench_serving, a `log`, and `limit_s`. For each a child is forked that is
bench_serving with these arguments, and a line of JSON tells its exit status and what it had of a core in seconds. So
every window is asked by a process of its own that begins at once, has nothing of the window before, and whose garbage
collector does not look through all that torch and Transformers made of themselves.

The tokenizer is read once. Without Hugging Face's `datasets`, which bench_serving imports for data that nobody asks for
here, there is an empty module of that name while it is imported.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_MODULE = "sglang.benchmark.serving"
"""SGLang's load generator. The former name, `sglang.bench_serving`, still works and warns."""


def load() -> Any:
    """The module of bench_serving."""
    import transformers  # noqa: F401  (asks whether there is `datasets`)

    with _datasets():
        return importlib.import_module(_MODULE)


@contextlib.contextmanager
def _datasets() -> Iterator[None]:
    if importlib.util.find_spec("datasets") is not None:
        yield
        return
    empty: Any = ModuleType("datasets")
    empty.load_dataset = None
    sys.modules["datasets"] = empty
    try:
        yield
    finally:
        del sys.modules["datasets"]


def run(serving: Any, arguments: list[str], log: str, limit_s: float) -> dict[str, Any]:
    """Exit status (negative: of a signal, SIGALRM's where it took longer than `limit_s`) and seconds of a core."""
    child = os.fork()
    if child == 0:
        _become(serving, arguments, log, limit_s)
    _, status, usage = os.wait4(child, 0)
    return {"status": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime}


def _become(serving: Any, arguments: list[str], log: str, limit_s: float) -> None:
    """Never returns."""
    status = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # nobody handles it, so it ends the process
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(to, 1)
        os.dup2(to, 2)
        sys.argv = ["bench_serving", *arguments]
        serving.cli_main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed by others is no answer
    serving = load()
    folder = sys.argv[1]
    for name in ("get_tokenizer", "check_chat_template"):
        once = functools.cache(getattr(serving, name))
        setattr(serving, name, once)
        once(folder)
    gc.collect()
    gc.freeze()
    print(json.dumps({"status": 0}), file=told)
    for line in sys.stdin:
        print(json.dumps(run(serving, **json.loads(line))), file=told)


if __name__ == "__main__":
    main()
