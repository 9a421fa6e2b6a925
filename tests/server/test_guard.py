"""Callers without the key, foreign web pages and foreign host names are refused."""

import pytest

from mlx_tq.__main__ import main

KEY = "correct-horse-battery"
PAGE = "https://example.org"


@pytest.fixture(scope="module")
def locked(start):
    """Run a server on all addresses, with an API key and one allowed web page."""
    return start("--host", "0.0.0.0", "--allowed-origins", PAGE, key=KEY)


@pytest.mark.parametrize("authorization", [None, "", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer n\u00e9"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/models/needle32", "/v1/plan", "/status"])
def test_a_missing_or_wrong_key_is_refused(locked, path, authorization):
    headers = {"Authorization": (authorization or "").encode("latin-1")}
    response = locked.http.get(path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in response.text
    unread = locked.http.post("/v1/chat/completions", content=b"{", headers=headers)
    assert unread.status_code == 401, "a body is not read without a key"


def test_the_key_is_accepted_and_not_logged(locked):
    assert locked.chat("hi", max_tokens=1).usage.completion_tokens == 1
    assert locked.http.get("/health", headers={"Authorization": ""}).status_code == 200
    assert KEY not in locked.log()


def test_cors_is_closed(server):
    for method in ("GET", "POST", "OPTIONS"):
        headers = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        response = server.http.request(method, "/v1/chat/completions", headers=headers)
        assert not [name for name in response.headers if name.startswith("access-control")]
    response = server.http.get("/v1/models", headers={"Origin": PAGE})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"


def test_cors_is_open_to_allowed_origins(locked):
    response = locked.http.get("/v1/models", headers={"Origin": PAGE})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, PAGE)
    response = locked.http.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization"
    assert locked.http.options("/v1/chat/completions", headers=preflight).status_code == 200


def test_its_own_page_may_call(server, locked):
    """A browser sends the page's origin with every POST."""
    host = server.url.removeprefix("http://")
    for origin, status in ((server.url, 200), ("http://localhost:3000", 403), ("null", 403), (f"http://x@{host}", 403)):
        assert server.http.get("/v1/models", headers={"Origin": origin}).status_code == status
    rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert server.http.get("/v1/models", headers=rebound).status_code == 403
    proxied = {"Host": "chat.example", "Origin": "https://chat.example"}  # with a key, any host name is allowed
    assert locked.http.get("/v1/models", headers=proxied).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "@127.0.0.1:80@x", "[", "a]b[c"]
)
def test_foreign_host_names_are_refused(server, host):
    """A page can make its own host name point to 127.0.0.1 (DNS rebinding)."""
    assert server.http.get("/v1/models", headers={"Host": host}).status_code in (400, 403)
    for local in ("localhost", "127.0.0.1:9", "[::1]:8080"):
        assert server.http.get("/v1/models", headers={"Host": local}).status_code == 200


def test_a_port_in_use(server, capsys):
    """No model is loaded first: whatever starts the server again and again would load it again and again."""
    assert main(["server", "--port", server.url.rpartition(":")[2]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "give another --port" in line
