"""Servers on loopback: S3 by moto, one that ignores conditional writes, and a proxy that cuts connections."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

import boto3
from botocore.config import Config

from waiting import HOUR

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
CREDENTIALS["AWS_DEFAULT_REGION"] = CREDENTIALS["AWS_REGION"]  # the name that boto3 reads


def access() -> dict[str, str]:
    """Return the environment variables of the S3 client, for processes that do not inherit them."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Run the S3 server of moto in a child process; yield its address."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + HOUR
        while True:
            try:
                urllib.request.urlopen(f"{address}/moto-api/", timeout=5).read()
                break
            except OSError:
                assert server.poll() is None, "moto did not start"
                assert time.monotonic() < deadline, "moto does not respond"
                time.sleep(0.05)
        yield address
    finally:
        server.terminate()
        server.wait()


def new_bucket(address: str) -> str:
    """Create a bucket and return a URL in it."""
    name = f"run-{uuid4().hex[:12]}"
    boto3.client("s3", endpoint_url=address, config=Config(s3={"addressing_style": "path"})).create_bucket(Bucket=name)
    return f"s3://{name}/shared"


class ServerWithoutConditions(BaseHTTPRequestHandler):
    """Enough of S3 to write, read and delete objects. It ignores the header If-None-Match."""

    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.objects[self.path] = body
        self._respond(200, b"", ETag='"e"')

    def do_GET(self) -> None:
        if self.path in self.objects:
            modified = "Sun, 01 Nov 2026 00:00:00 GMT"
            self._respond(200, self.objects[self.path], ETag='"e"', **{"Last-Modified": modified})
        else:
            self._respond(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_POST(self) -> None:
        """Delete several objects."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall(r"<Key>(.*?)</Key>", body)
        for key in keys:
            self.objects.pop(f"{self.path.split('?')[0]}/{key}", None)
        done = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._respond(200, f"<DeleteResult>{done}</DeleteResult>".encode())

    def _respond(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def server_without_conditions() -> Iterator[str]:
    """Run a server that accepts every write; yield its address."""
    handler = type("Handler", (ServerWithoutConditions,), {"objects": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class Proxy:
    """A proxy that forwards bytes to a server, records every request line, and cuts connections on demand.

    `cut_up` and `cut_down` are numbers of bytes after which a connection is cut, once for each number given.
    """

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("http://").split(":")
        self.target = (host, int(port))
        self.requests: list[str] = []
        self.up = self.down = 0
        self.cut_up: list[int] = []
        self.cut_down: list[int] = []
        self.cuts = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    if upwards:
                        lines = re.findall(rb"(?:GET|PUT|HEAD|DELETE|POST) \S+ HTTP/1\.1\r\n", data)
                        self.requests += [line.decode().rsplit(" ", 1)[0] for line in lines]
                        self.up += len(data)
                    else:
                        self.down += len(data)
                    passed += len(data)
                    limits = self.cut_up if upwards else self.cut_down
                    limit = limits[0] if limits else None
                    if limit is not None and passed > limit:
                        limits.pop(0)
                        self.cuts += 1
                        data = data[: max(0, len(data) - (passed - limit))]
                        sink.sendall(data)
                        break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    passing = Proxy(target)
    try:
        yield passing
    finally:
        passing.close()
