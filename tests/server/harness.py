"""A real server for the tests: `mlx_tq server` in a process of its own, on a free port."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
from cli.tools import command, environment
from http_harness import ServerProcess


class Server(ServerProcess):
    """A running server with its clients."""

    listening = re.compile(r"listening on (\S+)")

    def __init__(self, model, log_path, *flags, key=None, **variables):
        self.key = key
        if key:
            variables["MLX_TQ_API_KEY"] = key
        words = command("server", "--model", model, "--port", 0, *flags)
        super().__init__(words, environment(**variables), log_path, key)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", max_retries=0, timeout=120)

    def metrics(self):
        """Return the values of /metrics by name."""
        lines = self.http.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def chat(self, *messages, **options):
        """Return an answer of /v1/chat/completions; a message that is only text is the user's."""
        sent = [{"role": "user", "content": text} if isinstance(text, str) else text for text in messages]
        return self.openai.chat.completions.create(**{"model": "default_model", "messages": sent, **options})

    def post(self, path="/v1/chat/completions", **body):
        return self.http.post(path, json=body)

    def stop(self, sig=signal.SIGTERM):
        self.openai.close()
        return super().stop(sig)


@contextmanager
def running(*args, **options):
    """Run a server until the context ends."""
    server = Server(*args, **options)
    try:
        yield server
    finally:
        server.stop()


def text_of_stream(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def read_first_text(stream):
    """Read a stream until the answer has begun."""
    next(chunk for chunk in stream if chunk.choices[0].delta.content)


def together(calls):
    """Return the results of functions that run at once, in their own threads."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))
