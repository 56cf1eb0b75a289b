"""The documentation's table of spans against the code; tests/end_to_end/test_traces.py holds what is emitted against
it."""

import re
from pathlib import Path

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (
    "gateway/traces.py",
    "gateway/routing/relay.py",
    "gpu_scheduler/telemetry/traces.py",
    "gpu_scheduler/__main__.py",
    "services/telemetry/otlp.py",
)
ATTRIBUTE = re.compile(r"(?:gen_ai|prism|http|rpc|url|server|error|service)\.[a-z0-9_.]+")
SECTION = (ROOT / "docs" / "operate" / "monitoring.md").read_text().partition("## Traces")[2].partition("\n## ")[0]
ROWS = [line for line in SECTION.splitlines() if line.startswith("|")]
TOLD = {name for name in re.findall(r"`([^`]+)`", "\n".join(ROWS)) if ATTRIBUTE.fullmatch(name)}


def test_table_of_spans_names_exactly_the_attributes_that_the_code_sets():
    code = "".join((ROOT / source).read_text() for source in SOURCES)
    in_code = {name for name in re.findall(r'"([^"\n]+)"', code) if ATTRIBUTE.fullmatch(name)}
    by_the_sdk = {"service.name", "service.instance.id"}
    assert TOLD == in_code | by_the_sdk


def test_genai_attributes_are_those_of_opentelemetry_but_for_those_of_vllm():
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    others = {name for name in TOLD - known if name.startswith("gen_ai.")}
    assert {name for name in others if not name.startswith("gen_ai.latency.")} == {"gen_ai.request.id"}
