"""Do the tests notice? Each mutant is one small fault in a copy of the tree; the tests of its package must fail.

    python benchmarks/mutants/run.py [PACKAGE ...] [--jobs 2]

`tables/PACKAGE.toml` lists the mutants of a package and the tests to run. README.md beside this file gets a table of
what caught each; the exit code is 1 if any survived, or if a text to change is not there exactly once.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = HERE / "README.md"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "results")
HUNG_S = 300  # a mutant that makes the tests wait for so long is caught too
TITLE = "# Mutants\n\nEach row is a fault that was put into a copy of the tree, and the first test that failed of it.\n"
RUN = "Made by `python benchmarks/mutants/run.py`; the faults stand in `tables/`.\n"


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file` the only occurrence of `old` becomes `new`."""

    file: str
    fault: str
    old: str
    new: str
    tests: Sequence[str]

    def misfit(self, tree: Path) -> str | None:
        """Say what is wrong unless `old` is there exactly once."""
        count = (tree / self.file).read_text().count(self.old)
        return None if count == 1 else f"{self.file}: {self.old!r} is there {count} times"

    def apply(self, tree: Path) -> None:
        """Put the fault into a copy of the tree."""
        path = tree / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


@dataclass(frozen=True)
class Outcome:
    """What the tests said: `caught_by` is the first that failed, or None where all passed."""

    caught_by: str | None
    seconds: float


def read_table(package: str) -> list[Mutant]:
    """Return a package's mutants; one without tests of its own has the table's."""
    table = tomllib.loads((HERE / "tables" / f"{package}.toml").read_text())
    return [Mutant(**{"tests": table["tests"], **entry}) for entry in table["mutant"]]


def run_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """Run tests in a copy of the tree until the first that fails; raise RuntimeError if they cannot be run."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not full", *tests]
    # Plugins that the tests do not need take most of a start, and a start is most of a mutant.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "NO_SHRINKING": "1"}
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=HUNG_S)
    except subprocess.TimeoutExpired:
        return Outcome("a wait without end", HUNG_S)
    seconds = time.monotonic() - began
    if run.returncode == 0:
        return Outcome(None, seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(
            f"pytest ended with {run.returncode} and named no test:\n{run.stdout[-3000:]}{run.stderr[-3000:]}"
        )
    return Outcome(failed[1], seconds)


def try_mutant(pristine: Path, mutant: Mutant) -> Outcome:
    """Run a mutant's tests in a copy of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tree = shutil.copytree(pristine, Path(folder) / "tree")
        mutant.apply(tree)
        return run_tests(tree, mutant.tests)


def section(package: str, mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> str:
    """Return the table of a package in Markdown."""
    caught = sum(outcome.caught_by is not None for outcome in outcomes)
    rows = [
        f"| `{mutant.file}` | {mutant.fault} | {f'`{outcome.caught_by}`' if outcome.caught_by else '**survived**'} |"
        for mutant, outcome in zip(mutants, outcomes, strict=True)
    ]
    head = ["| file | fault | caught by |", "|---|---|---|"]
    return "\n".join([f"## {package}", "", f"{caught} of {len(mutants)} caught.", "", *head, *rows, ""])


def write_page(new: dict[str, str]) -> None:
    """Replace the sections of these packages in README.md; the others stay."""
    old = re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)[1:] if PAGE.exists() else []
    sections = {text.split()[1]: text.strip() + "\n" for text in old} | new
    PAGE.write_text("\n".join([TITLE, RUN, *(sections[name] for name in sorted(sections))]))


def main() -> int:
    """Try the mutants of the packages named, or of all."""
    packages = sorted(path.stem for path in (HERE / "tables").glob("*.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="*", help=f"of {', '.join(packages)}; all if none is named")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at once")
    arguments = parser.parse_args()
    if unknown := set(arguments.package) - set(packages):
        parser.error(f"no table for {', '.join(sorted(unknown))}; there are {', '.join(packages)}")
    tables = {package: read_table(package) for package in arguments.package or packages}
    if stale := [problem for mutants in tables.values() for m in mutants if (problem := m.misfit(ROOT))]:
        raise SystemExit("\n".join([*stale, "mend the tables"]))
    sections, survivors = {}, 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as workers:
        pristine = Path(shutil.copytree(ROOT, Path(folder) / "pristine", ignore=NOT_COPIED))
        for package, mutants in tables.items():
            if failed := run_tests(pristine, sorted({test for mutant in mutants for test in mutant.tests})).caught_by:
                raise SystemExit(f"{failed} fails without any mutant: mend it first")
            outcomes = []
            for mutant, outcome in zip(mutants, workers.map(lambda m: try_mutant(pristine, m), mutants), strict=True):
                print(
                    f"{package}: {mutant.fault}: {outcome.caught_by or 'SURVIVED'} ({outcome.seconds:.0f} s)",
                    flush=True,
                )
                survivors += outcome.caught_by is None
                outcomes.append(outcome)
            sections[package] = section(package, mutants, outcomes)
            write_page(sections)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
