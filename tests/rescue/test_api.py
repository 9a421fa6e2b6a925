"""The calls of the API as a client meets them."""

import pytest


def found(answer):
    return [(chunk["text"], tuple(chunk["token_range"])) for chunk in answer["chunks"]]


def test_what_was_written_is_found(shared):
    assert (
        shared.write("api-1", ("the access code is 481729", 0, 8), ("rain in the mountains", 20, 26)).status_code == 201
    )
    shared.wait_until_embedded()
    answer = shared.retrieve("api-1", "what is the access code?", top_k=1)
    assert answer["session_total"] == 2
    assert answer["mode"] == "hybrid"
    assert answer["degraded"] is None
    (chunk,) = answer["chunks"]
    assert chunk["text"] == "the access code is 481729"
    assert chunk["token_range"] == [0, 8]
    assert (chunk["layer"], chunk["score"], chunk["bm25"]) == (-1, 0.5, 1.0)
    assert chunk["similarity"] == chunk["dense"] > 0.3


def test_a_write_counts_once(shared):
    first = shared.write("api-2", ("one", 0, 4), ("two", 4, 8)).json()
    assert first == {"accepted": 2, "session_total": 2}
    again = shared.write("api-2", ("two", 4, 8), ("two", 5, 8), ("three", 4, 8)).json()
    assert again == {"accepted": 2, "session_total": 4}  # another range or another text is another span


def test_the_papers_dialect(shared):
    body = {"chunks": [{"text": "a fact of the paper", "tokens": [7, 3, 5], "round": 2, "layer": 11}]}
    written = shared.client.post("/evict/write?session_id=api-3", json=body)
    assert (written.status_code, written.json()) == (201, {"accepted": 1, "session_total": 1})
    answer = shared.client.post("/evict/retrieve?session_id=api-3", json={"query": "fact of the paper", "top_k": 8})
    (chunk,) = answer.json()["chunks"]
    assert (chunk["token_range"], chunk["layer"]) == ([3, 8], 11)


def test_dump_keeps_the_order_of_writing(shared):
    shared.write("api-4", ("b", 9, 10), ("a", 1, 2))
    assert shared.dump("api-4") == {
        "session_id": "api-4",
        "session_total": 2,
        "token_ranges": [[9, 10], [1, 2]],
        "layers": [-1, -1],
        "scores": [0.5, 0.5],
    }


def test_a_session_that_was_never_written_is_empty(shared):
    answer = shared.retrieve("api-never", "anything")
    assert (answer["chunks"], answer["session_total"]) == ([], 0)
    assert shared.dump("api-never")["session_total"] == 0
    assert shared.client.delete("/sessions/api-never").json()["code"] == "session_not_found"


def test_neighbours_are_joined_and_others_are_not(shared):
    shared.write("api-5", ("apple one", 0, 10), (" apple two", 10, 20), ("apple three", 21, 30), ("apple four", 25, 40))
    shared.wait_until_embedded()
    answer = shared.retrieve("api-5", "apple", top_k=8)
    assert sorted(found(answer)) == [
        ("apple four", (25, 40)),
        ("apple one apple two", (0, 20)),
        ("apple three", (21, 30)),
    ]


def test_spans_still_in_the_cache_are_left_out_only_when_all_of_them_is(shared):
    shared.write("api-6", ("pear alpha", 0, 10), ("pear beta", 20, 30))
    shared.wait_until_embedded()
    partly = shared.retrieve("api-6", "pear", exclude_ranges=[[0, 5], [5, 10], [25, 30]])
    assert found(partly) == [("pear beta", (20, 30))]
    assert found(shared.retrieve("api-6", "pear", exclude_ranges=[[0, 30]])) == []


def test_the_floor_is_held_against_the_similarity(shared):
    shared.write("api-7", ("kiwi kiwi kiwi", 0, 5), ("a long text about many things, and one kiwi", 10, 30))
    shared.wait_until_embedded()
    both = shared.retrieve("api-7", "kiwi")["chunks"]
    assert len(both) == 2
    high = [chunk for chunk in both if chunk["similarity"] >= 0.9]
    assert shared.retrieve("api-7", "kiwi", score_floor=0.9)["chunks"] == high
    assert len(high) == 1
    assert shared.retrieve("api-7", "kiwi", score_floor=None)["chunks"] == both  # this embedder has none of its own


def test_neighbours_are_joined_unless_they_are_asked_for_apart(shared):
    shared.write("api-12", ("a ripe fig", 0, 5), (" and a green fig", 5, 10))
    shared.wait_until_embedded()
    (both,) = shared.retrieve("api-12", "fig")["chunks"]
    assert (both["text"], both["token_range"]) == ("a ripe fig and a green fig", [0, 10])
    apart = shared.retrieve("api-12", "green fig", join=False)["chunks"]
    assert [chunk["token_range"] for chunk in apart] == [[5, 10], [0, 5]]
    assert apart[0]["similarity"] > apart[1]["similarity"]


@pytest.mark.parametrize(("alpha", "mode"), [(0, "bm25"), (0.5, "hybrid"), (1, "dense")])
def test_alpha_chooses_the_ranking(shared, alpha, mode):
    shared.write("api-8", ("grape", 0, 5))
    shared.wait_until_embedded()
    answer = shared.retrieve("api-8", "grape", hybrid_alpha=alpha)
    assert (answer["mode"], answer["degraded"]) == (mode, None)
    assert answer["chunks"][0]["text"] == "grape"


def test_hibernate_and_resume_lose_nothing(shared):
    shared.write("api-9", ("a plum in winter", 0, 5))
    shared.wait_until_embedded()
    before = shared.retrieve("api-9", "plum")
    assert shared.client.post("/sessions/api-9/hibernate").json() == {
        "session_id": "api-9",
        "resident": False,
        "vectors": 1,
    }
    (listed,) = [s for s in shared.client.get("/sessions").json()["sessions"] if s["session_id"] == "api-9"]
    assert (listed["resident"], listed["embedded"]) == (False, 1)
    assert shared.client.post("/sessions/api-9/resume").json() == {
        "session_id": "api-9",
        "resident": True,
        "vectors": 1,
    }
    assert shared.retrieve("api-9", "plum") == before
    assert shared.client.post("/sessions/api-none/resume").status_code == 404


def test_forgotten_is_gone_and_may_be_written_anew(shared):
    shared.write("api-10", ("a fig", 0, 5))
    shared.wait_until_embedded()
    assert shared.retrieve("api-10", "fig")["chunks"]
    assert shared.client.delete("/sessions/api-10").json() == {"session_id": "api-10", "forgotten": 1}
    assert shared.retrieve("api-10", "fig")["chunks"] == []
    shared.write("api-10", ("a date", 0, 5))
    assert shared.retrieve("api-10", "fig date")["chunks"][0]["text"] == "a date"


def test_a_span_is_found_before_it_has_a_vector(serve):
    server = serve(embedder="none")
    server.write("s", ("the gate opens at 7742", 0, 5))
    server.stop()
    server = serve(embed_batch=1)
    server.write("s", *((f"filler number {n}", 10 * n, 10 * n + 5) for n in range(1, 200)))
    answer = server.retrieve("s", "when does the gate open? 7742", top_k=1)
    assert answer["chunks"][0]["text"] == "the gate opens at 7742"


def test_works_without_an_embedder_and_says_so(serve):
    server = serve(embedder="none")
    server.write("s", ("the launch code is 481729", 0, 8), ("nothing of use", 20, 30))
    answer = server.retrieve("s", "launch code")
    assert answer["mode"] == "bm25"
    assert "embedder=none" in answer["degraded"]
    assert answer["chunks"][0]["similarity"] == 1.0
    assert answer["chunks"][0]["dense"] is None
    ready = server.client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["retrieval"] == "bm25"
    assert ready.json()["embedder"]["state"] == "off"


def test_every_answer_has_an_id_and_every_error_repeats_it(shared):
    plain = shared.client.get("/healthz", headers={"X-Request-ID": "my-id-1"})
    assert plain.headers["x-request-id"] == "my-id-1"
    failed = shared.client.get("/nowhere", headers={"X-Request-ID": "bad id\t!"})
    assert failed.status_code == 404
    assert failed.json()["request_id"] == failed.headers["x-request-id"] != "bad id\t!"
    assert failed.json()["code"] == "no_such_route"


def test_metrics_count_what_happened(serve):
    server = serve(embedder="none")
    server.write("s", ("a lemon", 0, 5))
    server.retrieve("s", "lemon")
    server.retrieve("s", "nothing")
    text = server.client.get("/metrics").text
    for line in (
        "rescue_spans_written_total 1.0",
        'rescue_retrievals_total{mode="bm25",outcome="hit"} 1.0',
        'rescue_retrievals_total{mode="bm25",outcome="miss"} 1.0',
        'rescue_requests_total{method="POST",route="/evict/write",status="201"} 1.0',
        "rescue_spans 1.0",
    ):
        assert line in text
