"""The tree of folders that README.md shows: each room of mlx_tq with the first line of its docstring."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Low to high: a room imports from those above it. One that is not named here comes last.
ORDER = "codec kernels policies cache seam sequence prefixes rescue conversation commands chat server evaluate bench"
AROUND = {
    "metal/": "the text of the GPU kernels, one kernel a file",
    "metal_sim/": "runs it on any CPU, and reports races, divergence and accesses out of bounds",
    "rescue_svc/": "the rescue service; it and mlx_tq never import each other",
    "benchmarks/": "what measures, its figures, and the tables of the docs",
    "examples/": "programs to begin from",
    "deploy/": "the rescue service in a container, or at login on macOS",
    "docs/": "guides, reference, how it works, measurements",
    "tests/": "mirrors the packages; contract/ holds mlx_tq to mlx-lm, property/ to a model of itself",
}


def first_line(package: Path) -> str:
    """The first line of a package's docstring.

    Raises:
        ValueError: it has none.
    """
    found = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    if not found:
        raise ValueError(f"{package} has no docstring; its first line says what the room is for.")
    return found.splitlines()[0]


def rooms() -> list[Path]:
    """The packages of mlx_tq, low to high."""
    order = ORDER.split()
    found = [path.parent for path in (ROOT / "mlx_tq").glob("*/__init__.py")]
    return sorted(found, key=lambda path: (order.index(path.name) if path.name in order else len(order), path.name))


def tree() -> str:
    """The tree, as a block of text."""
    lines = [f"{'mlx_tq/':16}the library and its commands, low to high:"]
    lines += [f"  {path.name + '/':14}{first_line(path)}" for path in rooms()]
    lines += [f"{name:16}{purpose}" for name, purpose in AROUND.items()]
    return "\n".join(["```text", *lines, "```"])


TABLES = {"rooms": tree}
