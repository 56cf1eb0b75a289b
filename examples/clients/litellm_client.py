"""LiteLLM as a library, by four of its providers, and as a proxy in front."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import litellm

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
SAID = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CONFIG = f"""
general_settings: {{master_key: sk-proxy}}
model_list:
  - model_name: small
    litellm_params: {{model: hosted_vllm/{MODEL}, api_base: {URL}/v1, api_key: none}}
"""
PORT = 18012

shared = {"messages": SAID, "api_key": "none", "max_tokens": 256, "temperature": 0}
for provider, base in (("openai", f"{URL}/v1"), ("hosted_vllm", f"{URL}/v1"), ("anthropic", URL)):
    model = f"{provider}/{MODEL}"
    assert litellm.completion(model, api_base=base, **shared).choices[0].message.content
    assert len(list(litellm.completion(model, api_base=base, stream=True, **shared))) > 1
    forced = litellm.completion(model, api_base=base, tools=[TOOL], tool_choice="required", **shared)
    assert forced.choices[0].message.tool_calls[0].function.name == "weather"
    print(f"{provider}: text, stream, tool")
assert litellm.responses(model=f"openai/{MODEL}", input="Say hello.", api_base=f"{URL}/v1", api_key="none").output
print("responses: text")

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.yaml").write_text(CONFIG)
    command = [str(Path(sys.executable).with_name("litellm")), "--config", "config.yaml", "--host", "127.0.0.1"]
    proxy = subprocess.Popen([*command, "--port", str(PORT), "--telemetry", "False"], cwd=folder)
    try:
        at = httpx.Client(
            base_url=f"http://127.0.0.1:{PORT}", headers={"authorization": "Bearer sk-proxy"}, timeout=120
        )
        while proxy.poll() is None:
            try:
                at.get("/health/liveliness")
                break
            except httpx.TransportError:
                time.sleep(0.5)
        body = {"model": "small", "messages": SAID, "max_tokens": 16}
        for path in ("/v1/chat/completions", "/v1/messages"):
            assert at.post(path, json=body).raise_for_status().json()["usage"]
        assert "[DONE]" in at.post("/v1/chat/completions", json={**body, "stream": True}).raise_for_status().text
        assert at.post("/v1/chat/completions", json={**body, "max_tokens": 10**6}).status_code == 400
        print("proxy: chat completions, stream, messages, a refusal")
    finally:
        proxy.terminate()
        proxy.wait()
