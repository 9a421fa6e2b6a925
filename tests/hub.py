"""A hub with one model, on a free port: the routes that the hub's client calls, range requests among them."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder as those of the model `name`; notes how many bytes of each were sent."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.folder = name, folder
        self.sent: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, files = unquote(urlsplit(self.path).path), sorted(self.server.folder.iterdir())
        model, file = f"/api/models/{self.server.name}", self.server.folder / Path(path).name
        if path.startswith(f"{model}/tree/"):
            sizes = [{"type": "file", "path": each.name, "size": each.stat().st_size, "oid": _COMMIT} for each in files]
            self._send(json.dumps(sizes))
        elif path.startswith(model):
            names = [{"rfilename": each.name} for each in files]
            self._send(json.dumps({"id": self.server.name, "sha": _COMMIT, "siblings": names}))
        elif path.startswith(f"/{self.server.name}/resolve/") and file in files:
            self._send_file(file)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if self.server.name in path else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send_file(self, file: Path) -> None:
        size, first, last = file.stat().st_size, 0, file.stat().st_size - 1
        if wanted := self.headers.get("Range"):
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            last = min(last, size - 1)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("ETag", f'"{hashlib.sha1(file.name.encode()).hexdigest()}"')
        self.send_header("X-Repo-Commit", _COMMIT)
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if self.command == "GET":
            with file.open("rb") as data:
                data.seek(first)
                self.wfile.write(data.read(last + 1 - first))
            self.server.sent[file.name] = self.server.sent.get(file.name, 0) + last + 1 - first

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode() if self.command == "GET" else b"")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve_hub(name: str, folder: Path) -> Iterator[Hub]:
    """Serve a folder as a model of the hub."""
    with Hub(name, folder) as hub:
        thread = Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
