"""Shepherd Model Gateway, the successor of SGLang's router, in front: models, a chat, a stream, a response."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
PORT, METRICS_PORT = 18013, 18014

command = [str(Path(sys.executable).with_name("smg")), "launch", "--backend", "openai", "--worker-urls", URL]
command += ["--host", "127.0.0.1", "--port", str(PORT), "--prometheus-port", str(METRICS_PORT)]
gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL)
try:
    at = httpx.Client(base_url=f"http://127.0.0.1:{PORT}/v1", headers={"authorization": "Bearer none"}, timeout=120)
    while gateway.poll() is None:
        try:
            if MODEL in [card["id"] for card in at.get("/models").json().get("data", [])]:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}
    assert at.post("/chat/completions", json=chat).raise_for_status().json()["choices"]
    assert "[DONE]" in at.post("/chat/completions", json={**chat, "stream": True}).raise_for_status().text
    response = at.post("/responses", json={"model": MODEL, "input": "Say hello.", "max_output_tokens": 16})
    assert response.raise_for_status().json()["output"]
    print("smg: models, chat, stream, response")
finally:
    gateway.terminate()
    gateway.wait()
