"""Prometheus itself on a running system: targets, rules, what every panel asks for, and alerts that come and go."""

import asyncio
import math
import os
import re
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest
import pytest_asyncio

from deploy import monitoring
from testing.ports import free_port, free_ports
from testing.systems.local import MODELS, world
from tests.deploy.monitoring.prometheus import PROMETHEUS, PROMTOOL, configure, prometheus
from tests.deploy.monitoring.test_monitoring import expressions, plain

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason="no Prometheus here: apt-get install prometheus"),
]
UNIT_TESTS = Path(__file__).with_name("alerts_test.yaml")
LEGEND = re.compile(r"{{(\w+)}}")


def promtool(*arguments, stdin=""):
    done = subprocess.run([PROMTOOL, *arguments], input=stdin, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


async def test_promtool_accepts_configuration_and_rules(tmp_path):
    status, said = promtool("check", "config", str(configure(tmp_path)))
    assert status == 0, said
    status, said = promtool("check", "rules", str(monitoring.ALERTS))
    assert status == 0, said


async def test_alerts_pass_their_unit_tests_in_promtool():
    status, said = promtool("test", "rules", str(UNIT_TESTS))
    assert status == 0, said


class Watched:
    """A system, its Prometheus, and the addresses that it asks."""

    def __init__(self, at, server, targets):
        self.at = at
        self.server = server
        self.targets = targets

    async def ask(self, model, ttft_ms="60000", tokens=4, prompt=40):
        headers = {"x-slo-ttft-ms": ttft_ms, "x-slo-tpot-ms": "60000"}
        body = {"model": model, "prompt": [7] * prompt, "max_tokens": tokens, "temperature": 0}
        status, answer = await self.at.post("/v1/completions", body, headers=headers)
        assert status == 200, answer

    async def busy(self):
        """Models that push each other out, one request that cannot be, and more of one model than it has KV for."""
        for model in MODELS:
            await self.ask(model)
        too_long = {"model": MODELS[0], "prompt": [7], "max_tokens": 1 << 30}
        assert (await self.at.post("/v1/completions", too_long))[0] == 400
        await asyncio.gather(*(self.ask(MODELS[1], tokens=1200, prompt=600) for _ in range(12)))

    async def lose_engines(self):
        """All of them, in the middle of an answer, which is made again."""
        started = asyncio.Event()
        stream = asyncio.get_running_loop().create_task(self.at.stream(MODELS[1], [7] * 40, 1000, started))
        await started.wait()
        for pid in self.at.engine_pids():
            os.kill(pid, signal.SIGKILL)
        await stream

    async def until_alerts(self, condition, what):
        async def look():
            return condition(await self.server.alerts())

        await self.at.until(look, what)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    disk = {"disk_folder": str(folder / "images"), "disk_capacity_bytes": 64 << 20}
    async with world("echo", metrics_port=free_ports(8), loader=disk) as at:
        configured = [tomllib.loads(path.read_text()) for path in at.local.state.glob("*.toml")]
        targets = [config["metrics"] for config in configured if "metrics" in config and config["name"] != "gateway"]
        targets.append(at.local.http)
        async with prometheus(folder, targets, f"127.0.0.1:{free_port()}") as server:
            yield Watched(at, server, targets)


async def test_prometheus_on_a_healthy_system_has_all_targets_up_and_no_alert(watched):
    async def evaluated():
        rules = await watched.server.rules()
        assert "err" not in rules.values(), rules
        targets = await watched.server.targets()
        return set(rules.values()) == {"ok"} and targets == dict.fromkeys(watched.targets, "up")

    await watched.at.until(evaluated, "a target is not up, or a rule not evaluated")
    await watched.ask(MODELS[0])
    asked = 'count_over_time(prism_gateway_answers_total{outcome="length"}[1m]) >= 3'

    async def seen():
        return await watched.server.query(asked)

    await watched.at.until(seen, "the request is not seen")
    assert await watched.server.alerts() == set()
    assert watched.server.faults() == []


async def test_metric_names_and_help_pass_the_linter_of_promtool(watched):
    for target in watched.targets:
        async with watched.at.http.get(f"http://{target}/metrics") as answer:
            _, said = promtool("check", "metrics", stdin=await answer.text())
        # vLLM's names, which others read.
        ours = [line for line in said.splitlines() if not line.startswith("vllm:")]
        assert ours == [], target


async def test_panels_and_rules_have_numbers_once_the_system_was_used(watched):
    asked = [query for row in monitoring.PANELS.values() for panel in row for query in panel.queries]

    async def without_numbers():
        missing = []
        for expression, legend in asked:
            found = await watched.server.query(plain(expression))
            for labels, _ in found:
                assert set(LEGEND.findall(legend)) <= set(labels), (expression, legend, labels)
            if all(math.isnan(value) for _, value in found):
                missing.append(expression)
        return missing

    async def all_there():
        await watched.busy()
        return not await without_numbers()

    await watched.lose_engines()
    try:
        await watched.at.until(all_there, "panels stay empty")
    except TimeoutError:
        pytest.fail(f"no numbers: {await without_numbers()}")
    # What a rule compares is there, whether it holds or not; of failures and misses the successes are.
    for expression in set(expressions()) - {expression for expression, _ in asked}:
        compared = re.sub(r" (==|>) [0-9.]+$", "", plain(expression).strip())
        compared = re.sub(r'code!~"[^"]*"', 'code=""', compared).replace('met="false"', 'met="true"')
        assert compared != plain(expression).strip() and await watched.server.query(compared), expression
    assert watched.server.faults() == []


async def test_late_answers_fire_an_alert(watched):
    async def fires():
        await watched.ask(MODELS[0], ttft_ms="1")
        return "PrismTargetsMissed" in await watched.server.alerts()

    await watched.at.until(fires, "PrismTargetsMissed never fired")


@pytest.mark.parametrize(
    "process, alert",
    [
        ("placement", "PrismRoutesStale"),
        ("gpu_scheduler-cpu-1", "PrismGroupUnreachable"),
        ("balloond", "PrismBalloondAway"),
    ],
)
async def test_process_that_is_away_fires_an_alert_until_it_is_back(watched, process, alert):
    expected = {alert, "PrismServiceDown"}
    async with watched.at.without(process):
        await watched.until_alerts(expected.issubset, f"{expected} do not fire")
    await watched.until_alerts(expected.isdisjoint, f"{expected} stay")
