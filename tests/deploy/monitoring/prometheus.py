"""Prometheus itself, as deploy/compose configures it, over the targets of a running system."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from deploy import monitoring
from testing.patience import PATIENCE_S

CONFIG = Path(monitoring.__file__).parents[1] / "compose" / "monitoring" / "prometheus.yaml"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
_SCRAPES_EVERY = "1s"
_READY = re.compile(r"Server is ready")
_FAULT = re.compile(r"level=(?:warn|error)")


def configure(folder: Path, targets: list[str] | None = None) -> Path:
    """The project's configuration and rules in `folder`; with `targets` those, asked more often, and alerts that need
    not hold for any time: how long they must is for `promtool test rules`."""
    config = yaml.safe_load(CONFIG.read_text())
    rules = monitoring.ALERTS.read_text()
    if targets is not None:
        rules = re.sub(r"for: \w+", "for: 0s", rules)
        config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
        config["global"] = dict.fromkeys(config["global"], _SCRAPES_EVERY)
    assert config["rule_files"] == ["/etc/prometheus/alerts.yaml"]
    (folder / "alerts.yaml").write_text(rules)
    config["rule_files"] = [str(folder / "alerts.yaml")]
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Prometheus:
    """A server that is up."""

    def __init__(self, address: str, http: aiohttp.ClientSession, log: Path) -> None:
        self._base = f"http://{address}/api/v1/"
        self._http = http
        self._log = log

    async def _get(self, path: str, **parameters: str) -> Any:
        async with self._http.get(self._base + path, params=parameters) as answer:
            body = await answer.json()
        assert body["status"] == "success", body
        return body["data"]

    async def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series, now."""
        found = (await self._get("query", query=expression))["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    async def targets(self) -> dict[str, str]:
        """Health by address."""
        found = (await self._get("targets"))["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in found}

    async def rules(self) -> dict[str, str]:
        """Health by name: what happened when the rule was last evaluated."""
        return {
            rule["name"]: rule["health"] for group in (await self._get("rules"))["groups"] for rule in group["rules"]
        }

    async def alerts(self) -> set[str]:
        """Names of those that fire."""
        return {a["labels"]["alertname"] for a in (await self._get("alerts"))["alerts"] if a["state"] == "firing"}

    def faults(self) -> list[str]:
        """What it logged as warnings and errors: series told twice, for instance."""
        return [line for line in self._log.read_text().splitlines() if _FAULT.search(line)]


@contextlib.asynccontextmanager
async def prometheus(folder: Path, targets: list[str], address: str) -> AsyncIterator[Prometheus]:
    """One that asks these addresses, until the block is left. `address`: where it listens."""
    assert PROMETHEUS is not None
    log = folder / "prometheus.log"
    arguments = (f"--config.file={configure(folder, targets)}", f"--storage.tsdb.path={folder / 'tsdb'}")
    with log.open("wb") as out:
        child = await asyncio.create_subprocess_exec(
            PROMETHEUS, *arguments, f"--web.listen-address={address}", stdout=out, stderr=out
        )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not _READY.search(log.read_text()):
                assert child.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as http:
            yield Prometheus(address, http, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        await child.wait()
