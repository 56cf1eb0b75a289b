"""Open WebUI in front, by the API that its page uses: models, a chat, a stream, a title."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
PORT = 18015

with tempfile.TemporaryDirectory() as folder:
    settings = {
        "OPENAI_API_BASE_URL": f"{URL}/v1",
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": "False",
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "a secret of this test alone, 32 bytes",
        "DATA_DIR": folder,
        "OFFLINE_MODE": "true",
        "RAG_EMBEDDING_ENGINE": "openai",
    }
    command = [str(Path(sys.executable).with_name("open-webui")), "serve", "--host", "127.0.0.1", "--port", str(PORT)]
    work = Path(folder, "work")  # it imports modules from the folder above
    work.mkdir()
    with open(Path(folder, "log"), "w") as log:
        server = subprocess.Popen(command, cwd=work, env={**os.environ, **settings}, stdout=log, stderr=log)
    try:
        at = httpx.Client(base_url=f"http://127.0.0.1:{PORT}/api", timeout=300)
        while server.poll() is None:
            try:
                signed_in = at.post("/v1/auths/signin", json={"email": "", "password": ""})
                break
            except httpx.TransportError:
                time.sleep(1)
        else:
            raise SystemExit(Path(folder, "log").read_text())
        at.headers["authorization"] = f"Bearer {signed_in.raise_for_status().json()['token']}"
        assert MODEL in [card["id"] for card in at.get("/models").raise_for_status().json()["data"]]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}
        assert at.post("/chat/completions", json=chat).raise_for_status().json()["choices"]
        assert "[DONE]" in at.post("/chat/completions", json={**chat, "stream": True}).raise_for_status().text
        assert at.post("/v1/tasks/title/completions", json=chat).raise_for_status().json()["choices"]
        print("open_webui: models, chat, stream, title")
    finally:
        server.terminate()
        server.wait()
