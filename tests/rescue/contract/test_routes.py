"""Every route and who may call it. A route that is added without an entry here fails the first test."""

import base64

import pytest
from fastapi.routing import APIRoute

from rescue_svc.guard import PrivateRoute, PublicRoute
from rescue_svc.routes import private, public

from ..harness import Server

TOKEN = "a-token-of-the-tests"

# method, path -> "anyone", or "token": whoever presents it, when one is set
ROUTES = {
    ("POST", "/evict/write"): "token",
    ("POST", "/evict/retrieve"): "token",
    ("GET", "/evict/dump"): "token",
    ("GET", "/sessions"): "token",
    ("DELETE", "/sessions/{session_id}"): "token",
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
    ("GET", "/evict/dump"): {"params": {"session_id": "s"}},
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("guarded") / "data", embedder="none", token=TOKEN)
    yield server
    server.stop()


def call(server, route, headers, **options):
    method, path = route
    server.write("s", ("t", 0, 1))
    client = server.client
    client.headers.pop("authorization", None)
    try:
        return client.request(
            method, path.format(session_id="s"), headers=headers, **{**GOOD.get(route, {}), **options}
        )
    finally:
        client.headers["authorization"] = f"Bearer {TOKEN}"


def test_the_table_is_complete():
    routes = [route for router in (public, private) for route in router.routes]
    assert {(method, route.path) for route in routes for method in route.methods} == set(ROUTES)
    assert all(isinstance(route, APIRoute) for route in routes)
    for route in routes:
        (method,) = route.methods
        expected = PrivateRoute if ROUTES[method, route.path] == "token" else PublicRoute
        assert type(route) is expected


def test_the_app_has_no_other_routes(guarded):
    paths = guarded.client.get("/openapi.json").json()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == set(ROUTES) - {("GET", "/openapi.json")}
    for path in ("/docs", "/redoc", "/static", "/docs/oauth2-redirect"):
        assert guarded.client.get(path).status_code == 404


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_who_may_call(guarded, route):
    basic = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
    wrong = base64.b64encode(b"anyone:wrong").decode()
    for headers in ({"Authorization": f"Bearer {TOKEN}"}, {"Authorization": f"Basic {basic}"}):
        assert call(guarded, route, headers).status_code in (200, 201)
    refusals = ["", "Bearer", "Bearer wrong", f"bearer {TOKEN}x", TOKEN, f"Basic {wrong}", "Basic !", "Bearer \xe9"]
    for header in refusals:
        answer = call(guarded, route, {"Authorization": header.encode("latin-1")} if header else {})
        if ROUTES[route] == "anyone":
            assert answer.status_code == 200
        else:
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
            assert "www-authenticate" in answer.headers


@pytest.mark.parametrize("route", [route for route in ROUTES if route[0] == "POST"], ids=" ".join)
def test_the_token_is_checked_before_the_body(guarded, route):
    """A body that would be refused by itself is not even looked at."""
    for content in (b"{", b" " * (11 * 2**20)):
        answer = call(guarded, route, {}, content=content, json=None)
        assert answer.status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:5054", "127.0.0.1.evil.example", ""])
@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_another_host_is_refused(guarded, route, host):
    """DNS rebinding: a name of someone else that leads to this machine."""
    answer = call(guarded, route, {"Authorization": f"Bearer {TOKEN}", "Host": host})
    assert (answer.status_code, answer.json()["code"]) == (403, "foreign_origin")


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_a_host_that_is_no_host_is_refused(guarded, route):
    """A path in the Host header must not be taken for the path that is asked (CVE-2026-48710)."""
    answer = call(guarded, route, {"Host": "localhost/healthz?"})
    assert answer.status_code in (400, 403)


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_a_page_of_another_site_is_refused(guarded, route):
    for origin in ("http://evil.example", "null", "http://localhost:1"):
        answer = call(guarded, route, {"Authorization": f"Bearer {TOKEN}", "Origin": origin})
        assert (answer.status_code, answer.json()["code"]) == (403, "foreign_origin")
    own = call(guarded, route, {"Authorization": f"Bearer {TOKEN}", "Origin": guarded.url})
    assert own.status_code in (200, 201)


def test_a_form_of_another_site_cannot_write(guarded):
    """A form needs no permission of the browser to post; its content types are none of ours."""
    content = b'{"session_id": "s", "chunks": [{"text": "forged", "token_range": [0, 1]}]}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
        answer = call(guarded, ("POST", "/evict/write"), headers, content=content, json=None)
        assert answer.status_code == 422
    assert "forged" not in str(guarded.retrieve("s", "forged"))
