"""The API: write, retrieve, sessions, metrics, limits."""

import pytest

from .harness import EACH_STORE


@EACH_STORE
def test_what_was_written_is_found(shared):
    written = shared.write("api-1", ("the access code is 481729", 0, 8), ("rain in the mountains", 20, 26))
    assert written.status_code == 201
    shared.wait_until_embedded()
    assert shared.dump("api-1") == {
        "session_id": "api-1",
        "session_total": 2,
        "token_ranges": [[0, 8], [20, 26]],
        "layers": [-1, -1],
        "scores": [0.5, 0.5],
    }
    answer = shared.retrieve("api-1", "what is the access code?", top_k=1)
    assert (answer["session_total"], answer["mode"], answer["degraded"]) == (2, "hybrid", None)
    (chunk,) = answer["chunks"]
    assert (chunk["text"], chunk["token_range"]) == ("the access code is 481729", [0, 8])
    assert (chunk["layer"], chunk["score"], chunk["bm25"]) == (-1, 0.5, 1.0)
    assert chunk["similarity"] == chunk["dense"] > 0.3
    for alpha, mode in ((0, "bm25"), (0.5, "hybrid"), (1, "dense")):
        by_mode = shared.retrieve("api-1", "access code", hybrid_alpha=alpha)
        assert (by_mode["mode"], by_mode["degraded"], by_mode["chunks"][0]["text"]) == (mode, None, chunk["text"])
    in_memory = shared.service.index.name == "faiss"
    for call, resident, vectors in ((shared.hibernate, False, 2 * in_memory), (shared.resume, in_memory, 2)):
        assert call("api-1") == {"session_id": "api-1", "resident": resident, "vectors": vectors}
        assert (shared.sessions()["api-1"]["resident"], shared.sessions()["api-1"]["embedded"]) == (resident, 2)
    assert shared.retrieve("api-1", "what is the access code?", top_k=1) == answer


@EACH_STORE
def test_spans_are_listed_in_the_order_of_writing(shared):
    shared.write("api-2", *((f"text {n}", 10 * n, 10 * n + 5) for n in (3, 1, 2)))
    answer = shared.http.get("/sessions/api-2/spans", params={"first": 1, "count": 1}).json()
    span = {"text": "text 1", "token_range": [10, 15], "layer": -1, "score": 0.5}
    assert answer == {"session_id": "api-2", "session_total": 3, "first": 1, "spans": [span]}
    texts = [span["text"] for span in shared.http.get("/sessions/api-2/spans").json()["spans"]]
    assert texts == ["text 3", "text 1", "text 2"]
    assert shared.http.get("/sessions/api-2/spans?first=3").json()["spans"] == []
    assert shared.http.get("/sessions/never/spans").json()["code"] == "session_not_found"
    assert shared.http.get("/sessions/api-2/spans?count=0").status_code == 422


@EACH_STORE
def test_the_papers_dialect(shared):
    body = {"chunks": [{"text": "a fact of the paper", "tokens": [7, 3, 5], "round": 2, "layer": 11}]}
    written = shared.http.post("/evict/write?session_id=api-3", json=body)
    assert (written.status_code, written.json()) == (201, {"accepted": 1, "session_total": 1})
    answer = shared.http.post("/evict/retrieve?session_id=api-3", json={"query": "fact of the paper", "top_k": 8})
    (chunk,) = answer.json()["chunks"]
    assert (chunk["token_range"], chunk["layer"]) == ([3, 8], 11)
    twice = shared.http.post("/evict/write?session_id=api-3", json={"session_id": "another", **body})
    assert (twice.status_code, "two different sessions" in twice.json()["detail"]) == (422, True)


@EACH_STORE
def test_adjacent_spans_are_joined(shared):
    shared.write("api-5", ("apple one", 0, 10), (" apple two", 10, 20), ("apple three", 21, 30), ("apple four", 25, 40))
    shared.wait_until_embedded()
    joined = {chunk["text"]: chunk["token_range"] for chunk in shared.retrieve("api-5", "apple", top_k=8)["chunks"]}
    assert joined == {"apple four": [25, 40], "apple one apple two": [0, 20], "apple three": [21, 30]}
    apart = shared.retrieve("api-5", "apple two", join=False)["chunks"]
    assert (len(apart), apart[0]["token_range"]) == (4, [10, 20])
    assert apart[0]["similarity"] > apart[1]["similarity"]


@EACH_STORE
def test_the_score_floor_applies_to_the_similarity(shared):
    shared.write_and_embed("api-7", ("kiwi kiwi kiwi", 0, 5), ("a long text about many things, and one kiwi", 10, 30))
    first, second = both = shared.retrieve("api-7", "kiwi")["chunks"]
    assert first["similarity"] >= 0.9 > second["similarity"]
    assert shared.retrieve("api-7", "kiwi", score_floor=0.9)["chunks"] == [first]
    assert shared.retrieve("api-7", "kiwi", score_floor=None)["chunks"] == both  # this embedder has no default floor


@EACH_STORE
def test_a_span_is_found_before_it_has_a_vector(start_service):
    service = start_service(embedder="none")
    service.write("s", ("the gate opens at 7742", 0, 5))
    service.stop()
    service = start_service(embed_batch=1)
    service.write("s", *((f"filler number {n}", 10 * n, 10 * n + 5) for n in range(1, 200)))
    assert service.search("s", "when does the gate open? 7742", top_k=1) == ["the gate opens at 7742"]


@EACH_STORE
def test_without_an_embedder_search_uses_keywords_and_is_counted(start_service):
    service = start_service(embedder="none")
    service.write("s", ("the launch code is 481729", 0, 8), ("nothing of use", 20, 30))
    answer = service.retrieve("s", "launch code")
    assert answer["mode"] == "bm25"
    assert "embedder=none" in answer["degraded"]
    assert (answer["chunks"][0]["similarity"], answer["chunks"][0]["dense"]) == (1.0, None)
    ready = service.http.get("/readyz")
    assert (ready.status_code, ready.json()["retrieval"], ready.json()["embedder"]["state"]) == (200, "bm25", "off")
    refused = service.http.post("/embed", json={"texts": ["rain"]})
    assert (refused.status_code, refused.json()["code"]) == (424, "embedder_unavailable")
    assert service.search("s", "absent") == []
    metrics = service.http.get("/metrics").text
    for line in (
        "rescue_spans_written_total 2.0",
        'rescue_retrievals_total{mode="bm25",outcome="hit"} 1.0',
        'rescue_retrievals_total{mode="bm25",outcome="miss"} 1.0',
        'rescue_requests_total{method="POST",route="/evict/write",status="201"} 1.0',
        "rescue_spans 2.0",
        'rescue_recent_search_seconds{quantile="0.5"}',
        'rescue_recent_search_seconds{quantile="0.95"}',
    ):
        assert line in metrics


def test_every_answer_has_an_id_and_every_error_repeats_it(shared):
    plain = shared.http.get("/healthz", headers={"X-Request-ID": "my-id-1"})
    assert plain.headers["x-request-id"] == "my-id-1"
    failed = shared.http.get("/nowhere", headers={"X-Request-ID": "bad id\t!"})
    assert (failed.status_code, failed.json()["code"]) == (404, "no_such_route")
    assert failed.json()["request_id"] == failed.headers["x-request-id"] != "bad id\t!"
    for refused in (shared.forget("never").json(), shared.resume("never"), shared.hibernate("never")):
        assert refused["code"] == "session_not_found"


@EACH_STORE
def test_caps_admit_what_just_fits_and_refuse_the_rest(start_service):
    service = start_service(embedder="none", max_session_spans=3, max_spans=5, max_sessions=3)
    spans = ("1", 0, 1), ("2", 1, 2), ("3", 2, 3), ("4", 3, 4)
    assert service.write("a", *spans[:3]).status_code == 201
    for session, refused, code, detail in (
        ("a", spans[3:], (413, "session_full"), "RESCUE_MAX_SESSION_SPANS"),
        ("b", spans[:3], (507, "store_full"), "5"),
    ):
        answer = service.write(session, *refused)
        assert (answer.status_code, answer.json()["code"]) == code
        assert detail in answer.json()["detail"]
    assert service.write("b", *spans[:1]).status_code == service.write("c", *spans[:1]).status_code == 201
    assert "3 sessions" in service.write("d", *spans[:1]).json()["detail"]
    assert {name: session["session_total"] for name, session in service.sessions().items()} == {"a": 3, "b": 1, "c": 1}


def test_embed_stores_nothing(shared):
    shared.wait_until_embedded()
    sessions = shared.sessions()
    answer = shared.http.post("/embed", json={"texts": ["the access code is 481729", "rain", "rain"]}).json()
    assert answer["model"] == "hashing-1"
    first, second, third = answer["vectors"]
    assert second == third != first
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-5)
    assert shared.sessions() == sessions
