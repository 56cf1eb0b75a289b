"""What became of a surface that was fuzzed, and whether what serves it took harm."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MIB = 1 << 20


@dataclass
class SurfaceOutcome:
    """Of one surface."""

    cases: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """How often each answer came: statuses, refusals, closed connections."""
    faults: list[str] = field(default_factory=list)
    """What must not be, with what was sent."""
    hangs: int = 0
    seconds: float = 0.0
    _kinds: set[str] = field(default_factory=set)
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each process: resident MiB and descriptors, before and after."""

    def fault(self, what: str) -> None:
        """One of each kind is kept: what differs in more than its numbers."""
        self.answers["FAULT"] += 1
        kind = re.sub(r"[0-9a-f]{6,}|[0-9]+", "#", what)[:160]
        if kind not in self._kinds:
            self._kinds.add(kind)
            self.faults.append(what[:1600])

    def merge(self, other: SurfaceOutcome) -> None:
        self.cases += other.cases
        self.answers += other.answers
        self.faults += other.faults
        self.hangs += other.hangs

    @classmethod
    def of_json(cls, told: dict[str, Any]) -> SurfaceOutcome:
        return cls(told["cases"], Counter(told["answers"]), told["faults"], told["hangs"])

    def as_json(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "answers": dict(self.answers.most_common()),
            "faults": self.faults,
            "hangs": self.hangs,
            "seconds": round(self.seconds, 1),
            "processes": self.processes,
        }


def resident_mib(pid: int) -> float:
    return round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB, 1)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class LogTails:
    """Lines of level error, or above, that come into log files from now on; traces are such lines too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = {path: path.stat().st_size for path in folder.rglob("*.log")}

    def faults(self) -> list[str]:
        found = []
        for path in sorted(self._folder.rglob("*.log")):
            with path.open("rb") as log:
                log.seek(self._read.get(path, 0))
                text = log.read()
            self._read[path] = self._read.get(path, 0) + len(text)
            lines = text.decode(errors="replace").splitlines()
            for number, line in enumerate(lines):
                if any(mark in line for mark in ('"level": "error"', '"level": "critical"')):
                    found.append(f"{path.stem}: {line[-500:]}")
                elif line.startswith("Traceback"):
                    found.append(f"{path.stem}: {' | '.join(lines[number : number + 30])[:1500]}")
        return found
