"""A stand-in for the Hugging Face hub on this machine: the part of its HTTP API with which `huggingface_hub` fetches
models, with its errors, and faults that a test chooses."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_ROUTES = (
    ("search", re.compile(r"/api/models")),
    ("tree", re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")),
    ("info", re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?")),
    ("resolve", re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")),
    ("content", re.compile(r"/content/(?P<sha256>[0-9a-f]{64})")),
)
_LFS = ".safetensors"
"""End of the names of files that lie elsewhere, where the hub redirects to."""


@dataclass
class HubRepository:
    """A repository: commits by hash, each a mapping of paths to contents, and the revisions that name them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    token: str = ""
    """The token that may read its files; empty: anybody may."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Path -> bytes that its listing tells instead of the true ones."""


class HubStandIn:
    """What the stand-in serves, and what it was asked."""

    def __init__(self) -> None:
        self.address = ""
        self.contents = ""
        """Address of large files: another host than the hub's, as there."""
        self.repositories: dict[str, HubRepository] = {}
        self.asked: list[tuple[str, str, str]] = []
        """(method, path, Range) of each request."""
        self.cut_after: dict[str, int] = {}
        """Path -> bytes after which its connection is cut, once."""
        self.stalled = threading.Event()
        """Set once an answer has stopped at `stall_after`."""
        self.stall_after: dict[str, int] = {}
        """Path -> bytes after which its answer waits until the stand-in ends."""
        self.ended = threading.Event()
        self._contents: dict[str, tuple[str, bytes]] = {}

    def publish(self, name: str, files: Mapping[str, bytes] | Path, revision: str = "main") -> str:
        """Adds a commit of these files, or of those of a folder, to a repository; returns its hash."""
        if isinstance(files, Path):
            files = {
                str(path.relative_to(files)): path.read_bytes() for path in sorted(files.rglob("*")) if path.is_file()
            }
        digest = hashlib.sha1(name.encode())
        for path, content in files.items():
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
            self._contents[hashlib.sha256(content).hexdigest()] = (path, content)
        repository = self.repositories.setdefault(name, HubRepository())
        repository.commits[digest.hexdigest()] = dict(files)
        repository.revisions[revision] = digest.hexdigest()
        return digest.hexdigest()

    def fetched(self) -> list[str]:
        """Paths of which contents were asked for, of all repositories."""
        return [
            self._contents[path.removeprefix("/content/")][0] if path.startswith("/content/") else path.split("/", 5)[5]
            for method, path, _ in self.asked
            if method == "GET" and ("/resolve/" in path or path.startswith("/content/"))
        ]

    def content(self, sha256: str) -> tuple[str, bytes]:
        return self._contents[sha256]


@contextmanager
def hub() -> Iterator[HubStandIn]:
    """A stand-in that serves while the context is open."""
    stand_in = HubStandIn()

    class Handler(_Handler):
        of = stand_in

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in.address = f"http://127.0.0.1:{server.server_port}"
    stand_in.contents = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of: HubStandIn

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.of.asked.append((self.command, url.path, self.headers.get("Range", "")))
        found = [(route, match) for route, pattern in _ROUTES if (match := pattern.fullmatch(url.path)) is not None]
        if not found:  # as a page of another server
            return self._answer(200, b"<!doctype html>", {"Content-Type": "text/html"})
        route, match = found[0]
        parts = {key: urllib.parse.unquote(value) for key, value in match.groupdict(default="main").items()}
        try:
            if route == "search":
                wanted = urllib.parse.parse_qs(url.query)["search"][0].lower()
                return self._json([{"id": each} for each in self.of.repositories if wanted in each.lower()])
            if route == "content":
                return self._content(*self.of.content(parts["sha256"]), {})
            repository, commit = self._find(parts["repository"], parts["revision"])
            files = repository.commits[commit]
            if route == "resolve":
                return self._resolve(repository, commit, files, parts["path"])
            described = [_described(path, content, repository.sizes.get(path)) for path, content in files.items()]
            if route == "tree":
                return self._json([{"type": "file", **each} for each in described])
            siblings = [
                {"rfilename": each["path"], "size": each["size"], "blobId": each["oid"]}
                | ({"lfs": {**each["lfs"], "sha256": each["lfs"]["oid"]}} if "lfs" in each else {})
                for each in described
            ]
            self._json({"id": parts["repository"], "sha": commit, "siblings": siblings})
        except _Refused as refused:
            self._answer(refused.status, b"", {"X-Error-Code": refused.code, "X-Error-Message": str(refused)})

    do_HEAD = do_GET

    def _find(self, name: str, revision: str) -> tuple[HubRepository, str]:
        repository = self.of.repositories.get(name)
        if repository is None:
            raise _Refused(404, "RepoNotFound", "Repository not found")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, commit

    def _resolve(self, repository: HubRepository, commit: str, files: dict[str, bytes], path: str) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository.token and not given:
            raise _Refused(401, "GatedRepo", "Access to this model is restricted.")
        if repository.token and given != repository.token:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        if path not in files:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        content = files[path]
        about = {"X-Repo-Commit": commit, "ETag": f'"{_described(path, content)["oid"]}"'}
        if not path.endswith(_LFS):
            return self._content(path, content, about)
        sha256 = hashlib.sha256(content).hexdigest()
        about |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{sha256}"'}
        self._answer(302, b"", about | {"Location": f"{self.of.contents}/content/{sha256}"})

    def _content(self, path: str, content: bytes, about: dict[str, str]) -> None:
        status, begin = 200, 0
        if (found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) is not None:
            status, begin = 206, int(found[1])
            about = about | {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        cut = self.of.cut_after.pop(path, None) if self.command == "GET" else None
        stall = self.of.stall_after.get(path) if self.command == "GET" else None
        self._answer(status, content[begin:], about, most=cut if cut is not None else stall)
        if stall is not None:
            self.of.stalled.set()
            self.of.ended.wait()

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str], most: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:most])
        if most is not None:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Nothing: `asked` has it."""


def _described(path: str, content: bytes, size: int | None = None) -> dict[str, Any]:
    """A file as listings have it."""
    nbytes = len(content) if size is None else size
    about: dict[str, Any] = {
        "path": path,
        "size": nbytes,
        "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
    }
    if path.endswith(_LFS):
        about["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": nbytes, "pointerSize": 1}
    return about
