"""Every route, who may call it, and that answers match the OpenAPI document."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rescue_svc.guard import PrivateRoute, PublicRoute
from rescue_svc.routes import private, public

from .harness import IN_FULL_EACH_STORE, TOKEN, URL, LocalService

# method, path -> "anyone", or "token": clients with the token, if one is set
ROUTES = {
    ("POST", "/evict/write"): "token",
    ("POST", "/evict/retrieve"): "token",
    ("POST", "/embed"): "token",
    ("GET", "/evict/dump"): "token",
    ("GET", "/sessions"): "token",
    ("DELETE", "/sessions/{session_id}"): "token",
    ("GET", "/sessions/{session_id}/spans"): "token",
    ("POST", "/sessions/{session_id}/renew"): "token",
    ("POST", "/sessions/{session_id}/hibernate"): "token",
    ("POST", "/sessions/{session_id}/resume"): "token",
    ("GET", "/healthz"): "anyone",
    ("GET", "/livez"): "token",
    ("GET", "/readyz"): "token",
    ("GET", "/metrics"): "token",
    ("GET", "/openapi.json"): "token",
    ("GET", "/"): "token",
}
GOOD = {
    ("POST", "/evict/write"): {"json": {"session_id": "s", "chunks": [{"text": "t", "token_range": [0, 1]}]}},
    ("POST", "/evict/retrieve"): {"json": {"session_id": "s", "query": "t"}},
    ("POST", "/embed"): {"json": {"texts": ["t"]}},
    ("GET", "/evict/dump"): {"params": {"session_id": "s"}},
}
BEARER = {"Authorization": f"Bearer {TOKEN}"}
EACH_ROUTE = pytest.mark.parametrize("route", ROUTES, ids=" ".join)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    service = LocalService(tmp_path_factory.mktemp("guarded") / "data", token=TOKEN)
    del service.http.headers["authorization"]  # each test sends its own
    yield service
    service.stop()


def call(service, route, headers, **options):
    service.http.post("/evict/write", **GOOD["POST", "/evict/write"], headers=BEARER)
    method, path = route
    return service.http.request(method, path.format(session_id="s"), headers=headers, **GOOD.get(route, {}) | options)


def refused(answer):
    return answer.status_code, answer.json()["code"]


def test_the_table_lists_all_routes(guarded):
    kinds = {PrivateRoute: "token", PublicRoute: "anyone"}
    routes = [*public.routes, *private.routes]
    assert {(method, route.path): kinds[type(route)] for route in routes for method in route.methods} == ROUTES
    paths = guarded.http.get("/openapi.json", headers=BEARER).json()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == set(ROUTES) - {("GET", "/openapi.json")}
    for path in ("/docs", "/redoc", "/static", "/docs/oauth2-redirect"):
        assert guarded.http.get(path, headers=BEARER).status_code == 404


@EACH_ROUTE
def test_who_may_call(guarded, route):
    basic = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
    wrong = base64.b64encode(b"anyone:wrong").decode()
    for header in (BEARER["Authorization"], f"Basic {basic}"):
        assert call(guarded, route, {"Authorization": header}).status_code in (200, 201)
    refusals = ["", "Bearer", "Bearer wrong", f"bearer {TOKEN}x", TOKEN, f"Basic {wrong}", "Basic !", "Bearer \xe9"]
    for header in refusals:
        answer = call(guarded, route, {"Authorization": header.encode("latin-1")} if header else {})
        if ROUTES[route] == "anyone":
            assert answer.status_code == 200
        else:
            assert refused(answer) == (401, "unauthorized")
            assert "www-authenticate" in answer.headers
    if route[0] == "POST":
        for content in (b"{", b" " * (11 * 2**20)):  # the body is not read
            assert call(guarded, route, {}, content=content, json=None).status_code == 401


@EACH_ROUTE
def test_foreign_hosts_and_origins_are_refused(guarded, route):
    """Against DNS rebinding and requests from pages of other sites."""
    for host in ("evil.example", "evil.example:5054", "127.0.0.1.evil.example", "", "[::1", "a]b"):
        assert refused(call(guarded, route, BEARER | {"Host": host})) == (403, "foreign_origin")
    # A path in the Host header must not replace the requested path (CVE-2026-48710).
    assert call(guarded, route, {"Host": "localhost/healthz?"}).status_code in (400, 403)
    for origin in ("http://evil.example", "null", "http://localhost:1", "http://["):
        assert refused(call(guarded, route, BEARER | {"Origin": origin})) == (403, "foreign_origin")
    assert call(guarded, route, BEARER | {"Origin": URL}).status_code in (200, 201)


def test_no_route_redirects_to_the_host_of_the_request(guarded):
    for path in ("/sessions/", "/healthz/", "/evict/dump/"):
        answer = guarded.http.get(path, headers={"Host": "evil.example"}, follow_redirects=False)
        assert refused(answer) == (404, "no_such_route")


def test_a_form_of_another_site_cannot_write(guarded):
    """A browser posts these content types without a preflight request."""
    content = b'{"session_id": "s", "chunks": [{"text": "forged", "token_range": [0, 1]}]}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        headers = BEARER | {"Content-Type": kind}
        assert call(guarded, ("POST", "/evict/write"), headers, content=content, json=None).status_code == 422
    answer = guarded.http.post("/evict/retrieve", json={"session_id": "s", "query": "forged"}, headers=BEARER)
    assert (answer.status_code, answer.json()["chunks"]) == (200, [])


@pytest.mark.full
@IN_FULL_EACH_STORE
def test_answers_match_the_openapi_document(start_server, tmp_path, times):
    server = start_server(max_sessions=10**6, token=TOKEN)
    server.write("known", ("a text", 0, 2), ("another", 2, 4))
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {TOKEN}"),
            *("--mode", "all", "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", str(times(500)), "--continue-on-failure", "--generation-database", "none"),
            *("--no-color", "--warnings", "off"),
        ],
        env=os.environ
        | {"SCHEMATHESIS_HOOKS": "rescue.schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parents[1])},
        cwd=tmp_path,  # where it writes its cache
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "Tested: 15" in run.stdout
    assert not [line for line in server.lines() if line["level"] == "error"]
