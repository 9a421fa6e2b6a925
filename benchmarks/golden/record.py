"""Golden runs: what every command and the library answer, kept before a change and compared after it.

python benchmarks/golden/record.py                       # run all, write today.json
python benchmarks/golden/record.py --then                # the same under the defaults of before.json: then.json
python benchmarks/golden/record.py --check               # run all, print what differs; exit code 1 where anything does
python benchmarks/golden/record.py --check --only chat   # only cases whose names begin so

before.json was recorded at commit f34aaad; docs/measurements/golden.md says what differs from it
now, and why that is right.
The cases are in cases.py; every name of mlx_tq that they need is in adapter.py. Times, rates, paths, versions and the
echo of the configuration are left out. The figures are of mlx's CPU backend: compare on the machine that recorded them.
"""

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import adapter
import mlx.core as mx
import numpy as np
from cases import COMMANDS, FACT, QUESTION, SERVED, Command, Options
from compare import HERE, NOTHING, differences

ROOT = HERE.parents[1]
LIMIT_S = 900
_LEFT_OUT = {
    *(
        "environment",
        "config",
        "arms",
        "ttft",
        "prompt_tps",
        "generation_tps",
        "peak_memory",
        "evict_seconds",
        "seconds",
    ),
    *("restore_seconds", "tiers", "archived", "archived_nbytes", "back"),  # said since, with nothing to compare with
    *("median", "low", "high", "ms", "id", "created", "index", "versions", "blas"),
}
_MASKS = (
    (r"[\d.,]+ tok/s", "# tok/s"),
    (r"after [\d.]+ s", "after # s"),
    (r"\([\d.]+ m?s\)", "(# s)"),
    (r"peak memory: .*", "peak memory: #"),
    (r"(conversation +)[0-9a-f]{8}", r"\1#"),
    (r"(127\.0\.0\.1):\d+", r"\1:#"),
    (r"(spans at the service) .*", r"\1 #"),
    (r" +", " "),
)
_UNSAID = ("statistics of questions and text are kept in", *adapter.SAID_SINCE)  # the first by one of several runs


class Runs:
    """Runs commands in a folder of its own, whose name is left out of what they say; `then` with earlier defaults."""

    def __init__(self, folder: Path, *, then: bool) -> None:
        self._folder, self._tmp, self._then = folder, folder / "tmp", then
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLX_TQ_", "RESCUE_"))}
        self._environment = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "OPENBLAS_NUM_THREADS": "1",  # sums do not depend on the number of cores
            "HF_HUB_OFFLINE": "1",
            "XDG_CONFIG_HOME": str(folder / "config"),  # no thresholds that were tuned here
            "XDG_CACHE_HOME": str(folder / "cache"),  # no statistics of questions that were asked before
            "RESCUE_EMBEDDER": "hashing",  # needs no weights
        }
        page = " ".join(adapter.text().split())
        self.page, long = f"{page[:900]} {page[:60]}", page[2000:3600]  # a page whose start comes again, to go on from
        self._words = {"tmp": self._tmp, "wide": folder / "wide", "long": long, "swept": adapter.swept(then)}
        self._words |= {name: folder / f"{name}.txt" for name in ("text", "fact")}
        self._words["text"].write_text(self.page)
        self._words["fact"].write_text(f"{self.page[:300]} {FACT} {self.page[300:1200]} {QUESTION}")
        adapter.wide_model(folder / "wide")

    def library(self, start: str) -> Iterator[tuple[str, Any]]:
        """The cases of library.py, one by one."""
        words = [sys.executable, str(HERE / "library.py"), start, "then" if self._then else "today"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, env=self._environment, text=True) as process:
            for line in process.stdout or ():
                name, value = json.loads(line)
                yield name, self._clean(value)

    def command(self, case: Command) -> list[Any]:
        """What each line of a case says, and the statistics that it leaves in a file."""
        found: list[Any] = []
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._tmp.mkdir()
        for line in case.lines:
            done = subprocess.run(
                self._command_line(line, case.evict),
                input=case.stdin.format(**self._words),
                capture_output=True,
                encoding="utf-8",
                env=self._environment | {"RESCUE_EMBEDDER": case.embedder},
                timeout=LIMIT_S,
                check=False,
            )
            found.append({"code": done.returncode, "out": self._parsed(done.stdout), "err": self._lines(done.stderr)})
            if case.quiet:
                del found[-1]["err"]
        return found + [_sketch(path) for path in sorted(self._tmp.glob("stats*"))]

    def served(self, flags: str, evict: Options | None, requests: tuple[tuple[str, Options], ...]) -> list[Any]:
        """The answers of a server to requests, one after the other."""
        words = self._command_line(f"server --model {{wide}} --port 0 {flags} {{evict}}", evict)
        with subprocess.Popen(words, env=self._environment, stderr=subprocess.PIPE, text=True) as server:
            try:
                said, url = [], ""
                while server.stderr and not url and (line := server.stderr.readline()):
                    said.append(line)
                    url = line.partition("listening on ")[2].strip()
                found: list[Any] = [self._lines("".join(said))]
                for path, body in requests:
                    asked = {name: self.page if value == "{page}" else value for name, value in body.items()}
                    text = json.dumps({"model": "default_model", "temperature": 0, **asked})
                    request = urllib.request.Request(url + path, text.encode(), {"Content-Type": "application/json"})
                    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                        found.append(self._clean(json.load(answer)))
                return found
            finally:
                server.terminate()

    def _command_line(self, line: str, evict: Options | None) -> list[str]:
        flags = shlex.join(adapter.evict_flags(evict or {}, self._then))
        words = shlex.split(line.replace("{evict}", flags).format(**self._words))
        words += adapter.flags_then(words) if self._then else []
        return [sys.executable, "-m", "mlx_tq", *words]

    def _parsed(self, text: str) -> Any:
        try:
            return self._clean(json.loads(text))
        except ValueError:
            return self._lines(text)

    def _lines(self, text: str) -> list[str]:
        for folder, name in ((self._tmp, "{tmp}"), (self._folder, "{folder}"), (ROOT, "{root}")):
            text = text.replace(str(folder), name)
        for pattern, mask in _MASKS:
            text = re.sub(pattern, mask, text)
        return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_UNSAID)]

    def _clean(self, value: Any) -> Any:
        """Without times; figures with four digits; equal rows of a list counted."""
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, str):
            return "\n".join(self._lines(value))
        if isinstance(value, dict):
            return {name: self._clean(each) for name, each in value.items() if name not in _LEFT_OUT}
        if isinstance(value, list):
            rows = [(each, len(list(group))) for each, group in groupby(map(self._clean, value))]
            return [{"times": count, **each} if isinstance(each, dict) and count > 1 else each for each, count in rows]
        return value


def _sketch(path: Path) -> dict[str, str]:
    """Shape, sum, norm and a projection of each array in a file."""
    found = {}
    for name, array in sorted(mx.load(str(path)).items()):
        flat = np.array(array.astype(mx.float32), np.float64).ravel()
        figures = (flat.sum(), np.linalg.norm(flat), flat @ np.cos(np.arange(flat.size)))
        found[name] = f"{array.shape} {' '.join(f'{figure:.4g}' for figure in figures)}"
    return found


def run(start: str, *, then: bool) -> Iterator[tuple[str, Any]]:
    """Name and result of all cases whose names begin with `start`, one by one."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder).resolve(), then=then)
        for name, case in COMMANDS.items():
            if name.startswith(start):
                yield name, runs.command(case)
        for name, served in SERVED.items():
            if name.startswith(start):
                yield name, runs.served(*served)
        if "library".startswith(start[:7]):
            yield from runs.library(start)


def main() -> int:
    """Record or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description="Golden runs: record them, or compare with those recorded.")
    parser.add_argument("--check", action="store_true", help="compare with the recorded runs instead of recording")
    parser.add_argument("--only", default="", metavar="START", help="cases whose names begin so")
    parser.add_argument("--then", action="store_true", help="under the defaults of before.json")
    args = parser.parse_args()
    file = HERE / ("then.json" if args.then else "today.json")
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    missing = {name for name in known if name.startswith(args.only)}
    runs, changed = 0, 0
    for name, found in run(args.only, then=args.then):
        runs += 1
        missing.discard(name)
        different = differences(known.get(name, NOTHING), found, name)
        changed += len(different)
        sys.stderr.write(f"{name}: {len(different)} differences\n")
        sys.stdout.write("".join(f"{each}\n" for each in different) if args.check else "")
        sys.stdout.flush()
        known[name] = found
    if not args.check:
        text = json.dumps(
            {name: found for name, found in known.items() if name not in missing},
            indent=1,
            sort_keys=True,
            ensure_ascii=False,
        )
        file.write_text(f"{text}\n", encoding="utf-8")
        return 0
    sys.stdout.write("".join(f"{name} is recorded, and was not run\n" for name in sorted(missing)))
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = spent.ru_utime + spent.ru_stime
    sys.stdout.write(f"{runs} runs, {changed + len(missing)} differences, {seconds:.0f} s of processor time\n")
    return 1 if changed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
