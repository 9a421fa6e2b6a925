"""Who may import whom. Each module imports only from what stands before it in `LAYERS`."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import mlx_tq

ROOT = Path(__file__).parents[1]

# Low to high. A module of mlx_tq, or a package with all that is in it, imports from the lines above its own; modules
# that share a line do not import each other.
LAYERS = (
    ("errors", "files"),
    ("codec",),
    ("config",),  # it knows which formats there are
    ("kernels",),
    ("evict",),
    ("cache",),
    ("probe", "memory", "models", "haystack", "environment", "images"),
    ("dispatch", "questions"),
    ("rescue",),
    ("stats",),
    ("session",),
    ("args", "prompts"),
    ("ui",),
    ("limits", "prompt_cache", "tune"),
    ("generate", "cache_prompt", "chat", "server", "evaluate", "calibrate", "bench", "doctor"),
    ("demo",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Third parties that a layer may import, where that is limited.
THIRD_PARTIES = {
    "errors": set(),
    "files": set(),
    "codec": {"mlx", "numpy"},
    "config": set(),
    "kernels": {"mlx"},
    "memory": {"mlx"},
}

# Imports inside a function that would close a circle at the top of the file.
LATE = {("mlx_tq.cache.compressed", "mlx_tq.cache.batch")}


class Import(NamedTuple):
    """One import statement's target."""

    target: str
    line: int


def modules(package: str) -> dict[str, Path]:
    """Files of a package by dotted name."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules("mlx_tq")
SERVICE = modules("rescue_svc")


def imports(name: str, path: Path) -> list[Import]:
    """All imports of a file, those inside functions too; `from package import module` counts as that module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively; write the whole name"
            found += [Import(resolve(str(node.module), alias.name), node.lineno) for alias in node.names]
    return found


def resolve(module: str, name: str) -> str:
    """The module that `from module import name` needs."""
    if f"{module}.{name}" in {**MODULES, **SERVICE}:
        return f"{module}.{name}"
    if module == "mlx_tq":
        return mlx_tq._HOMES.get(name, "mlx_tq")  # a public name, found lazily
    return module


IMPORTS = {name: imports(name, path) for name, path in {**MODULES, **SERVICE}.items()}


def layer(name: str) -> str:
    """The entry of LAYERS that a module of mlx_tq belongs to."""
    return name.split(".")[1]


def forbidden(importer: str, target: str) -> str | None:
    """Why a module of mlx_tq may not import another, or None."""
    if "mlx_tq" in (importer, target) or layer(importer) == layer(target):
        return None
    if lost := [name for name in (importer, target) if layer(name) not in RANK]:
        return f"{importer} imports {target}: {lost[0]} is in no layer"
    if RANK[layer(target)] < RANK[layer(importer)]:
        return None
    return f"{importer} may not import {target}: {layer(target)} is not below {layer(importer)} in LAYERS"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "mlx_tq"])
def test_module_has_a_place(name):
    assert layer(name) in RANK, (
        f"{name} is in no layer. Put {layer(name)!r} into LAYERS in {Path(__file__).name}: below everything that will "
        "import it, above everything that it imports."
    )


@pytest.mark.parametrize("name", MODULES)
def test_imports_only_from_below(name):
    wrong = [
        f"{forbidden(name, target)} ({MODULES[name].relative_to(ROOT)}:{line})"
        for target, line in IMPORTS[name]
        if target.split(".")[0] == "mlx_tq" and forbidden(name, target)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "mlx_tq" and layer(name) in THIRD_PARTIES])
def test_low_layers_need_little(name):
    used = {target.split(".")[0] for target, _ in IMPORTS[name]} - {"mlx_tq"} - sys.stdlib_module_names
    assert used <= THIRD_PARTIES[layer(name)]


def test_no_circles():
    """Also inside a package, and not hidden in a function: following imports never leads back."""
    graph = {
        name: {target for target, _ in IMPORTS[name] if target in MODULES and (name, target) not in LATE}
        for name in MODULES
    }
    while ends := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in ends:
            del graph[name]
    assert not graph, f"imports in a circle: {graph}"


@pytest.mark.parametrize(("importer", "target"), LATE)
def test_late_imports_exist(importer, target):
    """An exception that nothing needs any more is to be deleted."""
    tree = ast.parse(MODULES[importer].read_text(encoding="utf-8"))
    assert target not in {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert target in {found.target for found in IMPORTS[importer]}


@pytest.mark.parametrize(
    ("importer", "target", "allowed"),
    [
        ("mlx_tq.novelty", "mlx_tq.errors", False),
        ("mlx_tq.codec.rows", "mlx_tq.errors", True),
        ("mlx_tq.codec.rows", "mlx_tq.codec.formats.base", True),
        ("mlx_tq.codec.rows", "mlx_tq.config", False),
        ("mlx_tq.kernels.attend", "mlx_tq.cache.view", False),
        ("mlx_tq.memory", "mlx_tq.probe", False),
        ("mlx_tq.cache.view", "mlx_tq.dispatch", False),
        ("mlx_tq.generate", "mlx_tq.evaluate", False),
        ("mlx_tq.cli", "mlx_tq.generate", True),
    ],
)
def test_the_rule_itself(importer, target, allowed):
    assert (forbidden(importer, target) is None) == allowed


def test_packages_never_meet():
    """mlx_tq and the service speak JSON on the wire, nothing else."""
    for ours, theirs in ((MODULES, "rescue_svc"), (SERVICE, "mlx_tq")):
        for name in ours:
            assert theirs not in {target.split(".")[0] for target, _ in IMPORTS[name]}, name


def test_public_names_are_where_they_are_said_to_be():
    assert len(mlx_tq.__all__) <= 12
    for name in mlx_tq.__all__:
        assert getattr(mlx_tq, name).__name__ == name
        assert name in dir(mlx_tq)
    with pytest.raises(AttributeError, match="no attribute 'KVConfg'"):
        mlx_tq.KVConfg  # noqa: B018


def loaded_by(statement: str) -> set[str]:
    """What a fresh process has loaded after a statement."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_is_cheap():
    heavy = {"mlx", "mlx.core", "mlx_lm", "numpy", "transformers", "torch", "rich"}
    assert not loaded_by("import mlx_tq") & heavy


def test_codec_needs_no_model_code():
    assert not loaded_by("from mlx_tq import TurboQuant, KVConfig") & {"mlx_lm", "transformers", "torch"}
