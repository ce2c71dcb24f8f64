"""A model hub on this machine: what huggingface_hub needs to create, upload to and download from a repository.

Files are stored in memory. Large files go through the batch API of Git LFS, with the hash of every upload checked.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"
LARGE = 4096
"""Bytes from which the server asks for LFS; the hub decides by the kind of file and 10 MB."""


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Summary of each commit."""

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((self.commits, sorted(self.files))).encode()).hexdigest()


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Uploaded large files by SHA-256."""
    requests: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None: ...

    def reply(self, value: object, status: int = 200, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self) -> None:
        path, hub = unquote(urlsplit(self.path).path), self.hub
        hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        # The address of a large file is its permission, as on the hub.
        if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply({"error": "Invalid credentials in Authorization header"}, 401)
        parts = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            return self.reply({"name": "ann", "type": "user", "auth": {"accessToken": {"role": "write"}}})
        if path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization'] or 'ann'}/{given['name']}"
            if not name.startswith("ann/"):
                return self.reply({"error": "You don't have the rights to create a model under this namespace"}, 403)
            if name in hub.repositories:
                return self.reply({"error": "exists", "url": f"{hub.url}/{name}"}, 409)
            hub.repositories[name] = Repository(given.get("visibility") == "private" or bool(given.get("private")))
            return self.reply({"url": f"{hub.url}/{name}", "name": name})
        if parts[0] == "lfs":
            if hashlib.sha256(body).hexdigest() != parts[1]:
                return self.reply({"error": "the content has another hash"}, 400)
            hub.objects[parts[1]] = body
            return self.reply({})
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2]).removesuffix(".git")
        if name not in hub.repositories:
            return self.reply({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        repository = hub.repositories[name]
        if path.endswith("/info/lfs/objects/batch"):
            upload = [
                {**each, **({} if each["oid"] in hub.objects else {
                    "actions": {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}}})}
                for each in json.loads(body)["objects"]
            ]  # fmt: skip
            return self.reply({"transfer": "basic", "objects": upload})
        if parts[0] == "api" and "preupload" in parts:
            modes = {each["path"]: "lfs" if each["size"] > LARGE else "regular" for each in json.loads(body)["files"]}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self.reply({"files": files})
        if parts[0] == "api" and "commit" in parts:
            lines = [json.loads(line) for line in body.splitlines()]
            repository.commits.append(lines[0]["value"]["summary"])
            for line in lines[1:]:
                value = line["value"]
                large = line["key"] == "lfsFile"
                content = hub.objects[value["oid"]] if large else base64.b64decode(value["content"])
                repository.files[value["path"]] = content
            sha = repository.sha
            return self.reply({"commitUrl": f"{hub.url}/{name}/commit/{sha}", "commitOid": sha, "success": True})
        if parts[0] == "api" and "tree" in parts:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in repository.files.items()
            ]
            return self.reply(entries)
        if parts[0] == "api":  # information about the repository or a revision
            siblings = [{"rfilename": file} for file in sorted(repository.files)]
            about = {"id": name, "sha": repository.sha, "private": repository.private, "siblings": siblings, "tags": []}
            return self.reply(about)
        if "resolve" in parts:
            content = repository.files.get("/".join(parts[4:]))
            if content is None:
                return self.reply({"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound"})
            digest = hashlib.sha256(content).hexdigest()
            return self.reply(content, **{"ETag": f'"{digest}"', "X-Repo-Commit": repository.sha})
        return self.reply({"error": f"unknown route {path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = handle_request  # noqa: N815


@contextmanager
def running() -> Iterator[Hub]:
    """Serve a hub without repositories, in which `ann` may create some."""
    handler = type("OwnHandler", (Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield handler.hub
    finally:
        server.shutdown()
        thread.join()
