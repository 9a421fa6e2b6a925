"""A real service for the tests: its own process, its own files, killed with the signal that cannot be caught."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from processes import killed_on_failure

START_S = 30
STOP_S = 30


class Server:
    """`mlx-tq-rescue serve` on a free port. Its log is kept in `log_path`."""

    def __init__(self, data_dir: Path, *, embedder: str = "hashing", logs: Path | None = None, **settings: Any) -> None:
        self.data_dir = data_dir
        self.log_path = (logs or data_dir.parent) / f"service-{time.monotonic_ns()}.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RESCUE_")}
        environment |= {f"RESCUE_{name.upper()}": str(value) for name, value in settings.items()}
        environment |= {"RESCUE_DATA_DIR": str(data_dir), "RESCUE_EMBEDDER": embedder, "RESCUE_PORT": "0"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rescue_svc.cli", "serve"], env=environment, stderr=log
            )
        with killed_on_failure(self.process):
            self.url = self._wait_for_url()
        token = settings.get("token")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for line in self.log():
                if line.get("event") == "listening":
                    return line["url"]
            if self.process.poll() is not None:
                raise ServerExitedError(self.process.returncode, self.log_path.read_text())
            time.sleep(0.01)
        raise TimeoutError(self.log_path.read_text())

    def log(self) -> list[dict[str, Any]]:
        """The log so far; a line that is still being written is left out."""
        lines = self.log_path.read_text().split("\n")[:-1]
        return [json.loads(line) if line.startswith("{") else {"event": line} for line in lines]

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.client.close()

    def stop(self) -> None:
        """End it cleanly."""
        self.client.close()
        with self.process:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            finally:
                self.process.kill()

    def write(self, session: str, *chunks: tuple[str, int, int]) -> httpx.Response:
        body = {
            "session_id": session,
            "chunks": [
                {"text": text, "token_range": [start, end], "layer": -1, "score": 0.5} for text, start, end in chunks
            ],
        }
        return self.client.post("/evict/write", json=body)

    def retrieve(self, session: str, query: str, **options: Any) -> dict[str, Any]:
        answer = self.client.post("/evict/retrieve", json={"session_id": session, "query": query, **options})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def dump(self, session: str) -> dict[str, Any]:
        return self.client.get("/evict/dump", params={"session_id": session}).json()

    def ready(self) -> dict[str, Any]:
        return self.client.get("/readyz").json()

    def wait_until_embedded(self, timeout: float = 60) -> None:
        """Wait until the embedder is up and no span waits for its vector."""
        wait_for(lambda: (e := self.ready()["embedder"])["state"] == "ready" and e["pending"] == 0, timeout)


class ServerExitedError(Exception):
    """The service ended before it listened: its exit code, and what it said."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"exit code {code}: {said}")
        self.code = code
        self.said = said


def wait_for(condition: Any, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
