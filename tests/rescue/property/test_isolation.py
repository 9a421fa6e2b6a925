"""No answer ever holds a span of another session, whatever the ids look like."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ALPHABET = "ABCXYZabcxyz0189_-"
IDS = st.text(ALPHABET, min_size=1, max_size=64)


def neighbours(name):
    """Ids that a careless comparison could take for `name`."""
    return {name.swapcase(), name + "_", "_" + name, name[:-1], name[::-1], name.replace("_", "-"), name + name} - {
        name,
        "",
    }


def check(server, name, others):
    others = {other for other in others | neighbours(name) if 0 < len(other) <= 64 and other != name}
    for other in others:
        server.write(other, (f"the common word belongs to [{other}]", 0, 4))
    server.write(name, (f"the common word belongs to [{name}]", 0, 4))
    server.wait_until_embedded()
    for alpha in (0, 0.7, 1):
        answer = server.retrieve(name, "common word", hybrid_alpha=alpha, top_k=64, score_floor=-1)
        assert [chunk["text"] for chunk in answer["chunks"]] == [f"the common word belongs to [{name}]"]
        assert answer["session_total"] == 1
    assert server.dump(name)["session_total"] == 1
    server.client.delete(f"/sessions/{name}")
    assert server.retrieve(name, "common word")["chunks"] == []
    for other in others:
        answer = server.retrieve(other, "common word", hybrid_alpha=0)
        assert [chunk["text"] for chunk in answer["chunks"]] == [f"the common word belongs to [{other}]"]
        server.client.delete(f"/sessions/{other}")


def test_sessions_never_see_each_other(shared, scale):
    @settings(max_examples=40 * scale, deadline=None, suppress_health_check=list(HealthCheck))
    @given(name=IDS, others=st.sets(IDS, max_size=3))
    def fuzz(name, others):
        check(shared, name, others)

    fuzz()
