"""A real server for the tests: `mlx_tq server` in a process of its own, on a free port."""

import re
import signal
import subprocess
import threading
import time
from contextlib import contextmanager

import httpx
import openai
from cli.tools import command, environment
from processes import killed_on_failure

START_S = 300
STOP_S = 120


class Server:
    """A running server; what it says on stderr is in `log_path`."""

    def __init__(self, model, log_path, *flags, key=None, **variables):
        self.log_path, self.key = log_path, key
        if key:
            variables["MLX_TQ_API_KEY"] = key
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command("server", "--model", model, "--port", 0, *flags),
                env=environment(**variables),
                stderr=log,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        with killed_on_failure(self.process):
            self.url = self._wait_for_url()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", max_retries=0, timeout=120)

    def _wait_for_url(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if found := re.search(r"listening on (\S+)", self.log()):
                return found[1]
            assert self.process.poll() is None, self.log()
            time.sleep(0.02)
        raise TimeoutError(self.log())

    def log(self):
        return self.log_path.read_text()

    def metrics(self):
        """Numbers of /metrics by name, without labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def chat(self, *messages, **options):
        """An answer of /v1/chat/completions; a message that is only text is the user's."""
        said = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
        return self.openai.chat.completions.create(**{"model": "default_model", "messages": said, **options})

    def post(self, path="/v1/chat/completions", **body):
        return self.http.post(path, json=body)

    def stop(self, sig=signal.SIGTERM):
        """End it; returns the exit code."""
        self.http.close()
        self.openai.close()
        with self.process:
            try:
                self.process.send_signal(sig)
                return self.process.wait(STOP_S)
            finally:
                self.process.kill()


@contextmanager
def running(*args, **options):
    """A server that is ended afterwards, whatever happens."""
    server = Server(*args, **options)
    try:
        yield server
    finally:
        server.stop()


def together(calls):
    """The results of functions that run at once, in their own threads."""
    results = [None] * len(calls)

    def run(place, call):
        results[place] = call()

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def wait_for(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
