"""Random sequences of calls and restarts give the answers of a dict."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.store import copies

from .harness import IN_FULL_EACH_STORE, LocalService

EMBEDDER = HashingEmbedder()
WORDS = ["fox", "owl", "code", "7742", "river", "moon", "elephant", "été", "naïve", "x_1"]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)
STARTS = st.integers(0, 40)
SESSIONS = st.integers(0, 2)
RANGES = st.lists(st.tuples(STARTS, STARTS).map(sorted), max_size=2)
RUNS = itertools.count()


class Shared:
    """One service for all runs, because starting one takes longer than a run."""

    service: LocalService
    store: dict[str, str]  # its settings on PostgreSQL, which one may only stop and start
    folders: list[Path]  # the last is in use; each crash begins another


class Rescue(RuleBasedStateMachine):
    """The dict: session -> {(start, stop, text): layer}. Each span has its own layer, so that none are joined."""

    @initialize()
    def begin(self):
        self.run = next(RUNS)
        self.model = {}
        self.layers = itertools.count()

    def name(self, which):
        """Return similar ids: no answer may contain a span of another session."""
        return (f"run-{self.run}", f"RUN-{self.run}", f"run_{self.run}")[which]

    @rule(which=SESSIONS, spans=st.lists(st.tuples(STARTS, st.integers(1, 8), TEXTS), min_size=1, max_size=8))
    def write(self, which, spans):
        session = self.model.setdefault(self.name(which), {})
        chunks, new = [], 0
        for start, length, text in spans:
            layer = next(self.layers)
            chunks.append({"text": text, "token_range": [start, start + length], "layer": layer, "score": 0.0})
            if (start, start + length, text) not in session:
                session[start, start + length, text] = layer
                new += 1
        answer = Shared.service.http.post("/evict/write", json={"session_id": self.name(which), "chunks": chunks})
        assert answer.json() == {"accepted": new, "session_total": len(session)}

    @rule(which=SESSIONS, query=TEXTS, top_k=st.integers(1, 8), ranges=RANGES)
    def retrieve_dense(self, which, query, top_k, ranges):
        """Dense recall@k is exact."""
        Shared.service.wait_until_embedded()
        options = {"top_k": top_k, "hybrid_alpha": 1, "score_floor": -1, "exclude_ranges": ranges}
        answer = Shared.service.retrieve(self.name(which), query, **options)
        covered = {position for start, stop in ranges for position in range(start, stop)}
        session = self.model.get(self.name(which), {})
        spans = [span for span in session if not set(range(span[0], span[1])) <= covered]
        vector = EMBEDDER.embed([query])[0]
        cosines = {span: float(EMBEDDER.embed([span[2]])[0] @ vector) for span in spans}
        words = set(query.split())
        candidates = [c for span, c in cosines.items() if c > 0 or words & set(span[2].split())]
        results = [(*chunk["token_range"], chunk["text"]) for chunk in answer["chunks"]]
        assert len(results) == len(set(results)) == min(top_k, len(candidates))
        for span, chunk in zip(results, answer["chunks"], strict=True):
            assert chunk["layer"] == session[span]
            assert abs(chunk["dense"] - cosines[span]) < 1e-5
        best = sorted(candidates, reverse=True)[:top_k]
        np.testing.assert_allclose(sorted((cosines[span] for span in results), reverse=True), best, atol=1e-5)

    @rule(which=SESSIONS, query=TEXTS)
    def retrieve_by_words(self, which, query):
        """BM25 finds every span that shares a word, and no other."""
        answer = Shared.service.retrieve(self.name(which), query, top_k=64, hybrid_alpha=0)
        words = set(query.split())
        expected = {span for span in self.model.get(self.name(which), {}) if words & set(span[2].split())}
        results = {(*chunk["token_range"], chunk["text"]) for chunk in answer["chunks"]}
        assert results == expected if len(expected) <= 64 else results < expected

    @rule(which=SESSIONS)
    def forget(self, which):
        spans = self.model.pop(self.name(which), None)
        answer = Shared.service.forget(self.name(which))
        assert answer.status_code == (404 if spans is None else 200)
        assert spans is None or answer.json()["forgotten"] == len(spans)

    @rule(which=SESSIONS, call=st.sampled_from([LocalService.hibernate, LocalService.resume]))
    def move_the_index(self, which, call):
        assert ("vectors" in call(Shared.service, self.name(which))) == (self.name(which) in self.model)

    @precondition(lambda self: self.model)
    @rule(how=st.sampled_from(["stop", "crash", "rebuild"]))
    def restart(self, how):
        if Shared.store:
            how = "stop"
        if how == "crash":
            Shared.folders.append(Shared.service.killed(Shared.folders[0].with_name(str(len(Shared.folders)))))
        Shared.service.stop()
        if how == "rebuild":
            assert copies.rebuild(Shared.folders[-1]).lost == 0
        Shared.service = LocalService(Shared.folders[-1], **Shared.store)

    @invariant()
    def the_sessions_are_those_of_the_dict(self):
        listed = {name: session["session_total"] for name, session in Shared.service.sessions().items()}
        mine = {name: listed[name] for name in map(self.name, range(3)) if name in listed}
        assert mine == {name: len(spans) for name, spans in self.model.items()}
        for name, spans in self.model.items():
            assert [tuple(r) for r in Shared.service.dump(name)["token_ranges"]] == [span[:2] for span in spans]

    def teardown(self):
        for name in getattr(self, "model", {}):
            Shared.service.forget(name)


@IN_FULL_EACH_STORE
def test_the_service_is_a_dict(times, storage):
    with tempfile.TemporaryDirectory() as folder:
        Shared.folders = [Path(folder) / "0"]
        Shared.store = storage(Shared.folders[0])
        Shared.service = LocalService(Shared.folders[0], **Shared.store)
        try:
            runs = {"max_examples": times(150), "stateful_step_count": 20, "deadline": None, "print_blob": True}
            run_state_machine_as_test(Rescue, settings=settings(**runs, suppress_health_check=list(HealthCheck)))
        finally:
            Shared.service.stop()
