"""Measure how much of the prompts of coding agents a server reuses, and the time to first token by turn.

Eight recorded clients send their requests with made-up texts (`benchmarks.agents.replay`). Session `s1` is a first
task and a second one, `s2` the same task in another project, `s3` again in the first one. Arms:

    memory    all sessions, one after the other
    restart   SIGTERM in the middle of s1, then the rest of it and s3
    kill      as before, but kill -9 while an answer is streamed
    side      s1 with ten short requests of other texts after each turn, as many as mlx-lm's server keeps prompts
    two       s1 and s2 at once

mlx-lm's own server gets all requests as chats; it keeps no prompts on disk.

python -m benchmarks.agents.bench_agents --model FOLDER --servers mlx_tq mlx-lm     # of benchmarks.models.random_long
"""

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.agents.clients import ClientRequest
from benchmarks.agents.replay import TEMPLATE, Replay, Reuse, is_answer, read_events, send, summarize
from benchmarks.agents.texts import TRACES, one_token_words
from benchmarks.reports import RESULTS, save
from mlx_tq.models import load
from mlx_tq.models.load import local_path

ALL = sorted(path.stem for path in TRACES.glob("*.json"))
ANSWER_TOKENS, SIDE_REQUESTS = 16, 10
# mlx-lm's server with the matrix library that ours uses on a CPU, else it would be several times slower.
MLX_LM_SERVER = """\
from mlx_tq.cli.fast_blas import use_fast_blas
use_fast_blas()
from mlx_lm.server import main
main()"""


class Served:
    """A server in a process of its own, which can be ended and started again with its folder of prompts."""

    def __init__(self, command: list[str], log: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url, self._log, self._command = f"http://127.0.0.1:{port}", log, [*command, "--port", str(port)]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stderr=log, stdout=log)
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(self._log.read_text(encoding="utf-8"))
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def end(self, sig: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(sig)
        self._process.wait()

    def kept_bytes(self) -> int:
        """Return the bytes of the prompts in memory."""
        text = httpx.get(f"{self.url}/metrics").text
        if match := re.search(r"^mlx_tq_prompt_cache_bytes (\S+)", text, re.MULTILINE):
            return int(float(match[1]))
        found = re.findall(r"Prompt Cache: \d+ sequences, ([\d.]+) GB", self._log.read_text(encoding="utf-8"))
        return int(1e9 * float(found[-1])) if found else 0


class Bench:
    """The arms of a model. `as_chats` is for mlx-lm's own server."""

    def __init__(self, model: str, *, as_chats: bool) -> None:
        self._model, self._as_chats = model, as_chats
        self._tokenizer = load(model, tokenizer_config={"chat_template": TEMPLATE})[1]
        self._words = one_token_words(self._tokenizer)

    def arms(self) -> dict[str, Callable[[str], dict[str, Any]]]:
        arms: dict[str, Callable[[str], dict[str, Any]]] = {"memory": self.memory, "side": self.side, "two": self.two}
        if not self._as_chats:
            ended = partial(self.restart, signal.SIGTERM)
            arms |= {"restart": ended, "kill": partial(self.restart, signal.SIGKILL)}
        return arms

    @contextmanager
    def _serving(self) -> Iterator[tuple[Served, Path]]:
        with tempfile.TemporaryDirectory() as folder:
            store, limits = Path(folder) / "store", ["--max-tokens", str(ANSWER_TOKENS), "--chat-template", TEMPLATE]
            if self._as_chats:
                model = ["-c", MLX_LM_SERVER, "--model", str(local_path(self._model))]
            else:
                model = ["-m", "mlx_tq", "server", "--model", self._model, "--prefix-cache", str(store)]
            server = Served([sys.executable, *model, *limits], Path(folder) / "log")
            try:
                with httpx.Client(base_url=server.url, timeout=600) as http:
                    send(http, self._side_request(-1))  # one-time work of the process
                yield server, store
            finally:
                server.end()

    def _replay(self, client: str) -> Replay:
        return Replay(client, self._tokenizer, self._words, ANSWER_TOKENS, as_chats=self._as_chats)

    def _side_request(self, number: int) -> ClientRequest:
        text = f"Name this talk: {number} {' '.join(self._words[number % 100 :][:20])}"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        return ClientRequest("side", number, "/v1/chat/completions", {}, body, is_side=True)

    def memory(self, client: str) -> dict[str, Any]:
        replay = self._replay(client)
        with self._serving() as (server, store):
            reuses = list(replay.play(server.url, replay.of("s1", "s2", "s3", "c", "p2")))
            stored = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
            return {**summarize(reuses), **turns(reuses), "kept_bytes": server.kept_bytes(), "stored_bytes": stored}

    def restart(self, sig: signal.Signals, client: str) -> dict[str, Any]:
        replay = self._replay(client)
        requests = replay.of("s1")
        middle = len(requests) // 2
        with self._serving() as (server, _):
            list(replay.play(server.url, requests[:middle]))
            if sig is signal.SIGKILL:
                _kill_while_answering(server, requests[middle])
            else:
                server.end(sig)
            server.start()
            reuses = list(replay.play(server.url, [*requests[middle:], *replay.of("s3")]))
        first = {"first_token_after": round(reuses[0].first_token, 3), "prompt_tokens_after": reuses[0].prompt_tokens}
        return {**summarize(reuses), **first}

    def side(self, client: str) -> dict[str, Any]:
        replay = self._replay(client)
        requests, reuses = replay.of("s1"), list[Reuse]()
        with self._serving() as (server, _), httpx.Client(base_url=server.url, timeout=600) as http:
            for turn, reuse in enumerate(replay.play(server.url, requests)):
                reuses.append(reuse)
                for number in range(SIDE_REQUESTS):
                    send(http, self._side_request(SIDE_REQUESTS * turn + number))
        return {**summarize(reuses), "side_requests": SIDE_REQUESTS * len(requests)}

    def two(self, client: str) -> dict[str, Any]:
        return self.together([(client, "s1"), (client, "s2")])

    def together(self, agents: list[tuple[str, str]]) -> dict[str, Any]:
        """Let agents work at once; each counts as shared only what its own prompts share."""
        replays = [(self._replay(client), session) for client, session in agents]
        with self._serving() as (server, _), ThreadPoolExecutor(len(agents)) as pool:
            played = pool.map(lambda agent: list(agent[0].play(server.url, agent[0].of(agent[1]))), replays)
            return summarize([reuse for reuses in played for reuse in reuses])


def _kill_while_answering(server: Served, request: ClientRequest) -> None:
    with (
        httpx.Client(base_url=server.url, timeout=600) as http,
        http.stream("POST", request.route, json=request.body, headers=request.headers) as response,
    ):
        next(filter(is_answer, read_events(response.iter_lines())), None)
        server.end(signal.SIGKILL)


def turns(reuses: list[Reuse]) -> dict[str, Any]:
    """Return the seconds to first token: of the first turn, of the others of s1, and of the first of s3."""
    main = [reuse for reuse in reuses if not reuse.is_side]
    first, *later = [reuse.first_token for reuse in main if reuse.session == "s1"]
    again = next((round(reuse.first_token, 3) for reuse in main if reuse.session == "s3"), None)
    by_turn = [round(reuse.first_token, 3) for reuse in main if reuse.session == "s1"]
    return {"first": round(first, 3), "later": round(median(later), 3), "again": again, "by_turn": by_turn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", nargs="+", default=ALL, choices=ALL)
    parser.add_argument("--arms", nargs="+")
    parser.add_argument("--servers", nargs="+", default=["mlx_tq"], choices=["mlx_tq", "mlx-lm"])
    args = parser.parse_args()
    name = Path(args.model).stem
    path = RESULTS / f"agents_{name}.json"
    earlier = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.exists() else []
    figures = {(row["server"], row["client"], row["arm"]): row for row in earlier}
    command = f"python -m benchmarks.agents.bench_agents --model {name} --servers {' '.join(args.servers)}"
    command += f" --clients {' '.join(args.clients)}" + (f" --arms {' '.join(args.arms)}" if args.arms else "")

    def note(server: str, client: str, arm: str, figure: dict[str, Any]) -> None:
        figures[server, client, arm] = {"server": server, "client": client, "arm": arm, **figure}
        print(json.dumps(figures[server, client, arm]), flush=True)
        save(path, command, model=name, answer_tokens=ANSWER_TOKENS, figures=list(figures.values()))

    for server in args.servers:
        bench = Bench(args.model, as_chats=server == "mlx-lm")
        for client in args.clients:
            for arm, run in bench.arms().items():
                if (args.arms is None or arm in args.arms) and not (client == "aider" and arm == "two"):  # has no s2
                    note(server, client, arm, run(client))
        if args.arms is None or "all" in args.arms:
            note(server, "all", "all", bench.together([(client, "s1") for client in args.clients]))


if __name__ == "__main__":
    main()
