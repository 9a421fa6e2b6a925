"""Rules for Schemathesis that OpenAPI cannot express: ranges ascend, and the session is named once."""

import schemathesis


@schemathesis.hook
def before_call(context, case, kwargs):
    if not isinstance(case.body, dict) or not case.path.startswith("/evict/"):
        return
    chunks = case.body.get("chunks")
    for chunk in chunks if isinstance(chunks, list) else []:
        ends = chunk.get("token_range") if isinstance(chunk, dict) else None
        if isinstance(ends, list) and len(ends) == 2 and all(type(n) in (int, float) and n % 1 == 0 for n in ends):
            start, end = sorted(map(int, ends))
            chunk["token_range"] = [start, end] if start < end else [max(0, start - 1), max(1, end)]
    if case.body.get("session_id") is not None:
        (case.query or {}).pop("session_id", None)
    elif "session_id" not in (case.query or {}):
        case.body["session_id"] = "known"
