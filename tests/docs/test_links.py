"""What the pages refer to is there: other pages, files, flags, codes of errors, routes; and pages that nobody links."""

import re
import shlex

import pytest
from fastapi import FastAPI

from mlx_tq import errors
from mlx_tq.__main__ import main
from mlx_tq.server.api_errors import CODES, ApiError
from rescue_svc.errors import RescueServiceError
from rescue_svc.routes import private, public

from .pages import INDEX, PAGES, ROOT, anchors, commands, name, text, without_blocks

TROUBLESHOOTING = ROOT / "docs" / "reference" / "troubleshooting.md"
SERVICE = ROOT / "docs" / "reference" / "service_api.md"
SERVE = ROOT / "docs" / "guides" / "serve.md"
WRITTEN = [path for folder in ("mlx_tq", "rescue_svc", "metal", "metal_sim", "benchmarks", "tests", "examples")
           for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".metal", ".h")]  # fmt: skip


def links(page):
    return re.findall(r"\]\((?!https?:)([^)]+)\)", without_blocks(page))


def subclasses(base):
    return [base, *(name for child in base.__subclasses__() for name in subclasses(child))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve_and_files_exist(page):
    for link in links(page):
        path, _, part = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if part:
            assert part in anchors(target), link
    folders = "mlx_tq|metal|metal_sim|rescue_svc|tests|benchmarks|examples"
    named = re.findall(rf"`(?:pytest )?((?:{folders})/[\w/.]*)", text(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_index_links_every_page():
    linked = {(INDEX.parent / link.partition("#")[0]).resolve() for link in links(INDEX)}
    own = {page for page in PAGES if page.is_relative_to(INDEX.parent)} - {INDEX}
    assert own <= linked


def test_pages_that_the_code_names_exist():
    named = {found for path in WRITTEN for found in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text("utf-8"))}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_of_commands_exist(page, capsys):
    """Of all commands, those too that another test types shortened."""
    for line in commands(page):
        first, *words = shlex.split(line)
        package, _, command = first.partition(".")
        if package == "mlx_tq":
            measurement = words[:1] if command == "evaluate" else []
            for flag in ("--help", "--help-kv"):  # commands without a KV cache have only the first
                with pytest.raises(SystemExit):
                    main([command, *measurement, flag])
            known = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", capsys.readouterr().out))
            assert {word for word in words if re.match(r"--?[a-z]", word)} <= known, line


def test_the_tree_of_errors_is_that_of_the_code():
    tree = re.findall(r"^(?:[├└]── )?(\w+Error)\b", text(TROUBLESHOOTING), re.MULTILINE)
    assert sorted(tree) == sorted(name for name in vars(errors) if name.endswith("Error"))


@pytest.mark.parametrize("base", [ApiError, RescueServiceError], ids=["server", "service"])
def test_every_code_of_an_error_is_explained(base):
    codes = {each.code for each in subclasses(base)} | ({*CODES.values()} if base is ApiError else set())
    missing = [code for code in codes if f"`{code}`" not in text(TROUBLESHOOTING)]
    assert [code for code in missing if base is ApiError or code != "internal_error"] == []


def test_every_route_is_listed():
    app = FastAPI()
    app.include_router(public)
    app.include_router(private)
    routes = {(method.upper(), path) for path, found in app.openapi()["paths"].items() for method in found}
    listed = set(re.findall(r"`(GET|POST|DELETE) ([^`?]+)", text(SERVICE)))
    assert listed - {("GET", "/openapi.json")} == routes
    source = (ROOT / "mlx_tq" / "server" / "app.py").read_text("utf-8")
    routes = set(re.findall(r'\("(GET|POST)", "(/[^"{]*)"\)', source))
    assert len(routes) > 4
    assert routes == set(re.findall(r"`(GET|POST) ([^`?]+)`", text(SERVE)))
