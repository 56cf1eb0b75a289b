"""systemd itself, as process 1 of namespaces of its own, with Prism's units and nothing else.

It sees this machine's files, with the tree at /opt/prism and /etc and /run of its own; what it starts dies with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from testing.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
SYSTEMD = "/lib/systemd/systemd"
_NAMESPACES = ("--fork", "--pid", "--mount", "--mount-proc", "--uts", "--ipc", "--cgroup", "--kill-child")
_BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount --bind "$STATE/etc" /etc
mount -t tmpfs -o mode=755 tmpfs /opt
mkdir /opt/prism
mount --bind "$TREE" /opt/prism
# An interpreter in somebody's home is shown to all.
case $BASE in
    /root/*) mkdir /run/base; mount --bind "$BASE" /run/base
             mount -t tmpfs -o mode=755 tmpfs /root; mkdir -p "$BASE"; mount --bind /run/base "$BASE" ;;
esac
systemd-sysusers "$TREE/deploy/systemd/prism.sysusers.conf"
systemd-tmpfiles --create "$TREE/deploy/systemd/prism.tmpfiles.conf"
exec "$SYSTEMD" --unit=basic.target --log-target=console --show-status=no
"""
_BARE_TARGETS = ("basic", "sysinit", "shutdown", "network-online", "multi-user", "umount", "slices")


def missing() -> str:
    """Why there can be no machine here; empty when there can."""
    if os.geteuid() != 0:
        return "systemd as process 1 of namespaces needs root"
    for tool in (SYSTEMD, "systemctl", "systemd-sysusers", "systemd-tmpfiles", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if _cgroup2() is None:
        return "no cgroup2 that may be written to"
    tried = subprocess.run(["unshare", *_NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True)
    return "" if tried.returncode == 0 else f"no namespaces to be had: {tried.stderr.decode().strip()}"


def _cgroup2() -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(place, os.W_OK):
            return Path(place)
    return None


class Machine:
    """A running systemd."""

    def __init__(self, pid: int, state: Path) -> None:
        self.pid = pid
        self._console = state / "console"
        self.configuration = state / "etc" / "prism"
        self.run = Path(f"/proc/{pid}/root/run/prism")
        """Its /run/prism, as seen from here."""

    def said(self) -> str:
        return self._console.read_text(errors="replace")

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        command = ["nsenter", "-t", str(self.pid), "-a", "systemctl", "--no-pager", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def shows(self, unit: str, key: str) -> str:
        return self.systemctl("show", "--value", "--property", key, unit)

    def until(self, unit: str, key: str, value: str) -> None:
        """Waits until the unit shows this; systemctl cannot."""
        end = time.monotonic() + PATIENCE_S
        while (shown := self.shows(unit, key)) != value:
            assert time.monotonic() < end, f"{unit}: {key} is {shown}, not {value}\n{self.systemctl('status', unit)}"
            time.sleep(0.1)


@contextlib.contextmanager
def machine(state: Path, configuration: dict[str, str], drop_in: str) -> Iterator[Machine]:
    """Boots with the units of the tree, each with `drop_in`, and these files in /etc/prism. Its console is in
    `state`/console."""
    units = state / "units"
    shutil.copytree(ROOT / "deploy" / "systemd", units, ignore=lambda _, names: [n for n in names if n[:6] != "prism-"])
    shutil.copy(ROOT / "deploy" / "systemd" / "prism.target", units)
    for service in list(units.glob("*.service")):
        (units / f"{service.name}.d").mkdir()
        (units / f"{service.name}.d" / "test.conf").write_text(drop_in)
    for name in _BARE_TARGETS:
        (units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    (units / "system.slice").write_text("[Unit]\nDefaultDependencies=no\n")
    etc = state / "etc"
    etc.mkdir()
    for name in ("passwd", "group", "shadow", "gshadow", "ld.so.cache", "nsswitch.conf", "hosts"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(f"/etc/{name}", etc)
    (etc / "prism").mkdir()
    for name, text in configuration.items():
        (etc / "prism" / name).write_text(text)
    top = _cgroup2()
    assert top is not None
    cgroup = top / f"prism-test-{os.getpid()}"
    cgroup.mkdir()
    environment = {
        "PATH": os.environ["PATH"], "STATE": str(state), "TREE": str(ROOT), "BASE": sys.base_prefix,
        "SYSTEMD": SYSTEMD, "SYSTEMD_UNIT_PATH": str(units), "container": "prism-test",
    }  # fmt: skip
    with open(state / "console", "wb") as console:
        process = subprocess.Popen(
            ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec unshare "$@"', "sh", *_NAMESPACES, "sh", "-c", _BOOT],
            env=environment,
            stdout=console,
            stderr=console,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield Machine(_booted(process, state / "console"), state)
    finally:
        process.kill()
        process.wait()
        _remove(cgroup)


def _booted(process: subprocess.Popen[bytes], console: Path) -> int:
    """The pid of systemd, once it answers."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        assert process.poll() is None, console.read_text()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/root/run/systemd/private").exists():
            return int(children[0])
        time.sleep(0.05)
    raise AssertionError(f"systemd did not boot:\n{console.read_text()}")


def _remove(cgroup: Path) -> None:
    """Once the last of its processes, which are being killed, is gone."""
    end = time.monotonic() + PATIENCE_S
    for folder in [*sorted(cgroup.rglob("*/"), reverse=True), cgroup]:
        while folder.is_dir():
            try:
                folder.rmdir()
            except OSError:
                assert time.monotonic() < end, f"{folder}: {(folder / 'cgroup.procs').read_text()}"
                time.sleep(0.05)
