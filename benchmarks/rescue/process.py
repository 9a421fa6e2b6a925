"""Run a rescue service in its own process, and measure it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles

import httpx
import psutil


class Service:
    def __init__(self, directory: Path, embedder: str, **further: str) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - lives as long as the service
        settings = {"RESCUE_DATA_DIR": str(directory), "RESCUE_EMBEDDER": embedder, "RESCUE_PORT": "0"}
        settings |= {"RESCUE_QUERY_TIMEOUT_S": "30"}  # a slow embedder must show in the figures, not turn to BM25
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rescue_svc", "serve", "--max-session-spans", "10000000"],
            env=os.environ | settings | further,
            stderr=self.log,
        )
        self.url = self._url()
        self.address = self.url.removeprefix("http://")
        self.client = httpx.Client(base_url=self.url, timeout=120)
        self.client.get("/healthz")
        self.start_s = time.perf_counter() - began

    def _url(self) -> str:
        while self.process.poll() is None:
            for line in Path(self.log.name).read_text().splitlines():
                if '"listening"' in line:
                    return str(json.loads(line)["url"])
            time.sleep(0.005)
        raise RuntimeError(Path(self.log.name).read_text())

    def wait_until_hybrid(self) -> float:
        began = time.perf_counter()
        while self.client.get("/readyz").json()["retrieval"] != "hybrid":
            time.sleep(0.01)
        return time.perf_counter() - began

    def rss_mb(self) -> float:
        """Return the memory of the service without its embedder."""
        return psutil.Process(self.process.pid).memory_info().rss / 2**20

    def cpu_s(self) -> float:
        """Return the processor time of the service so far, without its embedder."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def embedder(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "spawn_main" in " ".join(child.cmdline()))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.client.close()
        self.log.close()


@contextmanager
def service(directory: Path, embedder: str, **further: str) -> Iterator[Service]:
    running = Service(directory, embedder, **further)
    try:
        yield running
    finally:
        running.stop()


def percentiles(seconds: list[float]) -> dict[str, float]:
    cuts = quantiles(seconds, n=100)
    return {f"p{p}_ms": round(cuts[p - 1] * 1000, 2) for p in (50, 95, 99)}
