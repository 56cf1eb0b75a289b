"""All measurements of engines on a GPU, one after the other: what docs/lab/gpu-runs.md says is from here.

    python -m benchmarks.gpu.suite --out DIR [NAME ...]                   on one GPU: about 25 minutes
    python -m benchmarks.gpu.suite --out DIR --rehearse [NAME ...]        on the CPU, small: does every program run?
    CUDA_VISIBLE_DEVICES=1 python -m benchmarks.gpu.suite ...             on another GPU of the machine

A folder for each, with its log and its JSON. A program that takes longer than expected is ended. `tensor_parallel`
needs two GPUs and runs only when named. Exit status 1 if a program failed; aims that are missed are said by each and do
not count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TINY = ("--device", "cpu:0", "--shape", "tiny")


@dataclass(frozen=True)
class Program:
    name: str
    limit_s: int
    """On a GPU whose kernels are compiled; a minute more where they are not."""
    rehearsal: tuple[str, ...]
    """Its arguments on the CPU."""
    arguments: tuple[str, ...] = ()
    """On a GPU."""
    module: str = ""
    by_default: bool = True

    @property
    def runs(self) -> str:
        return f"benchmarks.gpu.{self.module or self.name}"


_SHORT = (
    *("--windows", "2", "--window", "2", "--lead-in", "1", "--in-flight", "4"),
    *("--prompt", "32", "--output", "16", "--kv-gib", "0.05", "--context", "256"),
)

PROGRAMS = (
    Program("residency", 150, ("--device", "cpu:0", "--shapes", "tiny", "--cycles", "3"), ("--cycles", "10")),
    Program(
        "reclaim",
        150,
        (*_TINY, "--gib", "0.03", "--rounds", "2", "--streams", "2", "--context", "1024", "--grant-gib", "0.004")
        + ("--grants", "3", "--singles", "10", "--alone", "1"),
    ),
    Program("granularity", 120, (*_TINY, "--requests", "60", "--kv-gib", "0.03", "--longest", "400", "--idle", "1")),
    Program(
        "memory_adds_up",
        150,
        (*_TINY, "--kv-gib", "0.01", "--engines", "2", "--load", "3", "--context", "512", "--output", "64"),
    ),
    Program(
        "prefill_turn",
        150,
        (*_TINY, "--streams", "2", "--prompt", "1000", "--context", "2048", "--window", "3", "--output", "32"),
    ),
    Program("same_answers", 240, (*_TINY, "--prompts", "40", "--longest", "200", "--new", "48", "--runs", "2")),
    Program(
        "overhead",
        900,
        (
            *_TINY,
            "--windows",
            "2",
            "--window",
            "2",
            "--lead-in",
            "1",
            "--loads",
            "2,full",
            "--in-flight",
            "4",
            "--prompt",
            "32",
        )
        + ("--output", "16", "--kv-gib", "0.05", "--context", "256"),
    ),
    Program(
        "overhead_two",
        900,
        (
            *_TINY,
            "--parts",
            "two",
            "--windows",
            "2",
            "--window",
            "2",
            "--lead-in",
            "1",
            "--loads",
            "full",
            "--in-flight",
            "4",
        )
        + ("--prompt", "32", "--output", "16", "--kv-gib", "0.05", "--context", "256"),
        ("--parts", "two"),
        module="overhead",
    ),
    Program(
        "where",
        200,
        (*_TINY, "--loads", "2,full", "--window", "1", "--lead-in", "1", *_SHORT[6:]),
        by_default=False,
    ),
    Program(
        "tensor_parallel",
        240,
        ("--device", "cpu:0,cpu:1", "--shape", "tiny", "--prompts", "8", "--longest", "60", "--new", "12"),
        by_default=False,
    ),
    Program(
        "from_disk",
        300,
        (*_TINY, "--runs", "2", "--before"),
        ("--runs", "2", "--before"),
        by_default=False,
    ),
    Program(
        "load_beside",
        150,
        (*_TINY[2:], "--device", "cpu:0,cpu:1", "--gib", "0.03", "--seconds", "1", "--rounds", "1", "--streams", "2")
        + ("--context", "2048"),
        by_default=False,
    ),
    Program(
        "migration",
        300,
        ("--devices", "cpu:0", "cpu:1", "--streams", "3", "--prompt", "300", "--tokens", "300", "--rounds", "2"),
        by_default=False,
    ),
)
_REHEARSAL_S = 240


def parse() -> argparse.Namespace:
    names = [program.name for program in PROGRAMS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *names], help=", ".join(names))
    parser.add_argument("--out", type=Path, required=True, help="folder for folders of results")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU; the figures mean nothing")
    return parser.parse_args()


def run(program: Program, out: Path, commit: str, rehearse: bool) -> str:
    """ "ok", or what went wrong."""
    folder = out / program.name
    folder.mkdir(parents=True, exist_ok=True)
    arguments = program.rehearsal if rehearse else program.arguments
    command = [sys.executable, "-m", program.runs, "--out", str(folder), "--commit", commit, *arguments]
    with open(folder / "log", "w") as log:
        try:
            limit = _REHEARSAL_S if rehearse else program.limit_s + 60
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return f"ended after {limit} s"
    return "ok" if status == 0 else f"exit status {status}, see {folder / 'log'}"


def chosen(names: Sequence[str]) -> list[Program]:
    return [program for program in PROGRAMS if (program.name in names if names else program.by_default)]


def main() -> None:
    given = parse()
    failed = 0
    for program in chosen(given.names):
        begun = time.monotonic()
        what = run(program, given.out, given.commit, given.rehearse)
        failed += what != "ok"
        print(f"{program.name:<16} {time.monotonic() - begun:6.0f} s  {what}", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
