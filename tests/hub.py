"""A stand-in for the Hugging Face hub: the part of its HTTP interface that uploads and downloads of models use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import yaml

TOKEN: Final = "hf_InTheTestsOnly"  # of the one who owns all repositories
READER: Final = "hf_MayOnlyRead"
LFS: Final = (".safetensors", ".onnx")
MAIN: Final = "main"


@dataclass(frozen=True)
class Commit:
    message: str
    files: Mapping[str, bytes]

    @property
    def sha(self) -> str:
        content = [
            self.message,
            *(f"{name} {hashlib.sha1(self.files[name]).hexdigest()}" for name in sorted(self.files)),
        ]
        return hashlib.sha1("\n".join(content).encode()).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: list[Commit] = field(default_factory=lambda: [Commit("initial commit", {".gitattributes": b""})])
    branches: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.branches[MAIN] = self.commits[0].sha

    def at(self, revision: str) -> Commit | None:
        sha = self.branches.get(revision, revision)
        return next((each for each in self.commits if each.sha == sha), None)

    def add(self, branch: str, commit: Commit) -> None:
        self.commits.append(commit)
        self.branches[branch] = commit.sha

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files of ``main``."""
        commit = self.at(MAIN)
        assert commit is not None
        return commit.files


class Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", **more: str) -> None:
        self.status, self.code, self.message, self.more = status, code, message, more


class Hub:
    """The content of the hub; ``address`` is where it answers, and ``requests`` are those that it has got."""

    def __init__(self) -> None:
        self.address = ""
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []

    def repository(self, name: str, token: str) -> Repository:
        found = self.repositories.get(name)
        if found is None or (found.private and token != TOKEN):
            raise Refused(404 if token == TOKEN else 401, "RepoNotFound", "Repository not found")
        return found

    def commit(self, name: str, revision: str, token: str) -> Commit:
        found = self.repository(name, token).at(revision)
        if found is None:
            raise Refused(404, "RevisionNotFound", "Invalid rev id")
        return found

    def write(self, name: str, token: str) -> Repository:
        found = self.repository(name, token)
        if token != TOKEN:
            raise Refused(403, message="Forbidden: pass a token with write access")
        return found

    def wanted(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Say where to upload a large file, unless it is here."""
        to = {"href": f"{self.address}/lfs/{entry['oid']}"}
        return entry if entry["oid"] in self.blobs else {**entry, "actions": {"upload": to}}

    def post(self, path: str, body: bytes, token: str) -> Any:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if token != TOKEN:
                raise Refused(403 if token == READER else 401, message=f"Not with the token {token}")
            if name in self.repositories:
                raise Refused(409, message="You already created this model repo", url=f"{self.address}/{name}")
            self.repositories[name] = Repository(asked.get("private") or asked.get("visibility") == "private")
            return {"url": f"{self.address}/{name}"}
        if path == "/api/validate-yaml":
            _, header, _ = json.loads(body)["content"].split("---\n", 2)
            return {"errors": [] if isinstance(yaml.safe_load(header), dict) else [{"message": "no metadata"}]}
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self.write(found[1], token)
            return {"transfer": "basic", "objects": [*map(self.wanted, json.loads(body)["objects"])]}
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/([^/]+)", path)
        if found is None:
            raise Refused(404, message="Not found")
        repository, revision = self.write(found[1], token), unquote(found[3])
        if found[2] == "branch":
            if revision in repository.branches:
                raise Refused(409, message="Reference already exists")
            repository.branches[revision] = repository.branches[MAIN]
            return {}
        parent = self.commit(found[1], revision, token)
        if found[2] == "preupload":
            names = [each["path"] for each in json.loads(body)["files"]]
            return {"files": [_mode(name, parent.files.get(name)) for name in names]}
        lines = [json.loads(line) for line in body.splitlines()]
        files = dict(parent.files)
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.blobs[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        repository.add(revision, commit := Commit(lines[0]["value"]["summary"], files))
        address = f"{self.address}/{found[1]}/commit/{commit.sha}"
        return {"success": True, "commitOid": commit.sha, "commitUrl": address}

    def get(self, path: str, token: str) -> Any:
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?", path):
            commit = self.commit(found[1], unquote(found[2] or MAIN), token)
            files = [{"rfilename": name} for name in commit.files]
            return {
                "id": found[1],
                "modelId": found[1],
                "sha": commit.sha,
                "private": self.repositories[found[1]].private,
                "siblings": files,
                "tags": [],
            }
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path)
        if found is None:
            raise Refused(404, message="Not found")
        files = self.commit(found[1], unquote(found[2]), token).files
        return [_entry(name, content) for name, content in files.items()]

    def file(self, path: str, token: str) -> tuple[bytes, dict[str, str]]:
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if found is None:
            raise Refused(404, message="Not found")
        commit = self.commit(found[1], unquote(found[2]), token)
        if (name := unquote(found[3])) not in commit.files:
            raise Refused(404, "EntryNotFound", "Entry not found")
        entry = _entry(name, commit.files[name])
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        return commit.files[name], {"X-Repo-Commit": commit.sha, "ETag": f'"{etag}"'}


def _entry(name: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry = {"type": "file", "path": name, "size": len(content), "oid": oid}
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"lfs": {"oid": digest, "size": len(content), "pointerSize": 130}}
    return entry | (lfs if name.endswith(LFS) else {})


def _mode(name: str, content: bytes | None) -> dict[str, Any]:
    mode = {"path": name, "uploadMode": "lfs" if name.endswith(LFS) else "regular", "shouldIgnore": False}
    if content is None:
        return mode
    entry = _entry(name, content)
    return mode | {"oid": entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            path, token = urlsplit(self.path).path, self.headers.get("authorization", "").removeprefix("Bearer ")
            hub.requests.append(f"{self.command} {path}")
            body, headers = self.body(), {}
            try:
                if self.command == "PUT":
                    hub.blobs[hashlib.sha256(body).hexdigest()] = body
                    content = b""
                elif self.command == "POST":
                    content = json.dumps(hub.post(path, body, token)).encode()
                elif "/resolve/" in path:
                    content, headers = hub.file(path, token)
                else:
                    content = json.dumps(hub.get(path, token)).encode()
                status = 200
            except Refused as refused:
                content, status = json.dumps({"error": refused.message, **refused.more}).encode(), refused.status
                headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = answer

        def body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def served() -> Iterator[Hub]:
    """Yield an empty hub that answers on a port of this machine."""
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
