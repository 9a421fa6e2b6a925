"""Who may import whom. Each module imports only from what stands before it in `LAYERS`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_tq

ROOT = Path(__file__).parents[1]

# Of each package, low to high. A module, or a folder with all that is in it, imports from what stands before its own <;
# modules between the same two < do not import each other.
LAYERS = {
    "mlx_tq": "errors < files < codec < kernels < distributed < policies < config < models < cache < integration"
    " < prompt_cache < prefix_cache < rescue < speculative < session < grammar < cli < clients"
    " < generate connect chat cache_prompt calibrate doctor store demo server evaluate bench < __main__",
    "http_limits": "json_body log_limit process_checks request_checks request_parser service_socket web_page"
    " < connections",
    "rescue_svc": "errors < schemas settings metrics web < logs < store < index embed postgres < opening validation"
    " < service guard middleware < routes < app < ephemeral < commands < cli < __main__",
}
RANK = {
    (package, name): rank
    for package, layers in LAYERS.items()
    for rank, names in enumerate(layers.split(" < "))
    for name in names.split()
}

# Third parties that a layer may import, where that is limited; those that it may not.
ONLY = {
    "errors": set(),
    "files": set(),
    "codec": {"mlx", "numpy"},
    "kernels": {"mlx", "numpy"},  # NumPy's exp is vectorized on CPUs
    "distributed": {"mlx", "mlx_lm", "numpy"},
    "policies": {"mlx", "numpy"},
    "config": set(),
}
NO_HTTP = {"fastapi", "starlette", "uvicorn"}  # the service knows none
TORCH = {"rescue_svc.embed.sentence_models"}  # where the child calls them


def modules(package: str) -> dict[str, Path]:
    paths = sorted((ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


MODULES = modules("mlx_tq") | modules("rescue_svc") | modules("http_limits")


def imports(name: str, path: Path) -> list[tuple[str, int]]:
    """Return (module, line) of all imports, those inside functions too; `from package import module` is that module."""
    targets = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively; write the whole name"
            targets += [(resolve(str(node.module), alias.name), node.lineno) for alias in node.names]
    return targets


def resolve(module: str, name: str) -> str:
    if f"{module}.{name}" in MODULES:
        return f"{module}.{name}"
    if module == "mlx_tq" and name in mlx_tq.__all__:  # public names are found lazily
        return getattr(mlx_tq, name).__module__
    return module


IMPORTS = {name: imports(name, path) for name, path in MODULES.items()}


def place(name: str) -> tuple[str, ...]:
    """Return the package and the entry of LAYERS that a module belongs to."""
    return tuple(name.split(".")[:2])


def may_import(importer: str, target: str) -> bool:
    """Return whether the layers allow an import; of another package of ours only http_limits may be imported."""
    if "." not in importer or place(importer) == place(target) or target in LAYERS or place(target)[0] not in LAYERS:
        return True
    if place(importer)[0] != place(target)[0]:
        return place(target)[0] == "http_limits"
    return place(importer) in RANK and RANK[place(target)] < RANK[place(importer)]


def test_every_module_has_a_place_and_imports_only_from_below():
    missing = {place(name) for name in MODULES if "." in name} - RANK.keys()
    assert not missing, f"put {missing} into LAYERS: below all that will import it, above all that it imports"
    lines = [(name, target, line) for name, targets in IMPORTS.items() for target, line in targets]
    wrong = [f"{name}:{line} imports {target}" for name, target, line in lines if not may_import(name, target)]
    assert not wrong, f"only what stands before < in LAYERS may be imported, not {wrong}"


def test_low_layers_need_little_and_the_service_no_models():
    for name, targets in IMPORTS.items():
        package, *layer = place(name)
        used = {target.split(".")[0] for target, _ in targets} - {package} - sys.stdlib_module_names
        if package == "mlx_tq" and layer and layer[0] in ONLY:
            assert used <= ONLY[layer[0]], name
        assert "mlx_vlm" not in used, name
        if package == "rescue_svc":
            assert not used & {"mlx", "mlx_lm"}, name
            assert "torch" not in used or name in TORCH, name
            assert layer != ["service"] or not used & NO_HTTP, name


def test_no_circles():
    """Also inside a package, and not hidden in a function: following imports never leads back."""
    graph = {name: {target for target, _ in targets if target in MODULES} for name, targets in IMPORTS.items()}
    while ends := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in ends:
            del graph[name]
    assert not graph, f"imports in a circle: {graph}"


def test_imports_inside_functions_say_what_they_save_except_in_run_of_a_command():
    """They hide from a reader what a module needs. A command's parser shares a file with `run`, and needs little."""
    silent = []
    for path in MODULES.values():
        lines = path.read_text(encoding="utf-8").splitlines()
        functions = [node for node in ast.walk(ast.parse("\n".join(lines))) if hasattr(node, "args")]
        names = {node.name for node in functions if isinstance(node, ast.FunctionDef)}
        commands = [f for f in functions if getattr(f, "name", "") == "run" and "build_parser" in names]
        inner = {n.lineno for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)}
        inner -= {n.lineno for f in commands for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)}
        silent += [f"{path.relative_to(ROOT)}:{line}" for line in sorted(inner) if "#" not in lines[line - 1]]
    assert not silent, f"say on the line what importing here saves: {silent}"


@pytest.mark.parametrize(
    ("importer", "target", "allowed"),
    [
        ("mlx_tq.novelty", "mlx_tq.errors", False),
        ("mlx_tq.codec.rows", "mlx_tq.errors", True),
        ("mlx_tq.codec.rows", "mlx_tq.codec.formats.base", True),
        ("mlx_tq.codec.rows", "mlx_tq.config", False),
        ("mlx_tq.cache.layer", "mlx_tq.prompt_cache.layer_group", False),
        ("mlx_tq.generate", "mlx_tq.evaluate", False),
        ("mlx_tq.__main__", "mlx_tq.generate", True),
        ("mlx_tq.rescue.client", "rescue_svc.schemas", False),
        ("mlx_tq.server.process", "http_limits.connections", True),
        ("http_limits.connections", "rescue_svc.errors", False),
        ("rescue_svc.store.sqlite_store", "rescue_svc.service.rank", False),
    ],
)
def test_the_rule_itself(importer, target, allowed):
    assert may_import(importer, target) == allowed


def test_the_simulator_stands_alone():
    """It is installed with neither, and knows of no kernel."""
    simulator = {name: imports(name, path) for name, path in modules("metal_sim").items()}
    roots = {target.split(".")[0] for targets in simulator.values() for target, _ in targets} - sys.stdlib_module_names
    assert roots == {"metal_sim", "mlx", "numpy", "pytest"}
    assert "metal_sim" not in {target.split(".")[0] for targets in IMPORTS.values() for target, _ in targets}


def test_public_names_are_where_they_are_said_to_be():
    assert len(mlx_tq.__all__) <= 14
    for name in mlx_tq.__all__:
        assert getattr(mlx_tq, name).__name__ == name
        assert name in dir(mlx_tq)
    with pytest.raises(AttributeError, match="no attribute 'KVConfg'"):
        mlx_tq.KVConfg  # noqa: B018


MODEL_CODE = {"mlx_lm", "transformers", "torch"}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import mlx_tq", {"mlx", "mlx.core", "numpy", "rich", *MODEL_CODE}),
        ("from mlx_tq import TurboQuant, KVConfig", MODEL_CODE),
        ("import rescue_svc.commands.serve", {"sentence_transformers", "mlx", "mlx_tq", *MODEL_CODE}),
        ("import rescue_svc.embed.worker", {"faiss", "fastapi", "mlx", "mlx_tq", "torch"}),
        ("import rescue_svc.cli", {"fastapi", "faiss", "numpy"}),
    ],
)
def test_what_a_fresh_process_has_loaded(statement, absent):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & absent
