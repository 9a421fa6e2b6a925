"""Who imports whom: only from the left; never mlx_tq; torch only in the child, and FAISS never beside it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "rescue_svc"

# Each imports only from lines above its own (and from its own folder).
ORDER = [
    {"errors", "__init__"},
    {"schemas", "settings", "logs", "metrics", "web"},
    {"store"},
    {"index", "embed"},
    {"service", "guard", "middleware"},
    {"routes"},
    {"app"},
    {"doctor", "launchd"},
    {"commands"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            if node.module == "rescue_svc":
                yield from (
                    f"rescue_svc.{alias.name}" for alias in node.names if (PACKAGE / f"{alias.name}.py").exists()
                )


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_left(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imports(path):
        root, _, rest = module.partition(".")
        assert root not in ("mlx_tq", "mlx", "mlx_lm")
        assert root != "torch" or path.name == "minilm.py"  # which imports it where the child calls it
        part = rest.split(".")[0]
        if root == "rescue_svc" and part and part != own:
            assert LEVEL[part] < LEVEL[own], f"{own} imports {part}"
        if own == "service":
            assert root not in ("fastapi", "starlette", "uvicorn")  # the service knows no HTTP


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("rescue_svc.commands", {"torch", "sentence_transformers", "mlx", "mlx_tq", "transformers"}),
        ("rescue_svc.embed.child", {"faiss", "fastapi", "mlx", "mlx_tq", "torch"}),
        ("rescue_svc.cli", {"fastapi", "faiss", "numpy"}),
    ],
)
def test_what_is_loaded(module, absent):
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & absent


def test_the_service_holds_faiss_and_no_model(serve):
    server = serve()
    server.write("s", ("a fig", 0, 5))
    server.wait_until_embedded()
    server.retrieve("s", "fig")
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    assert "faiss" in maps.read_text()
    assert "libtorch" not in maps.read_text()
