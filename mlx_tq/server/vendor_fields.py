"""Fields that clients of other servers send: what they mean here, and which are refused because they mean too much."""

from typing import Any

Object = dict[str, Any]

# Without support, an answer would have another form or another content than was asked for.
REFUSED = frozenset(
    (
        *("functions", "function_call", "audio", "web_search_options", "documents", "adapters", "lora", "draft_model"),
        *("grammar", "guided_grammar", "guided_choice", "stop_token_ids", "ignore_eos", "min_tokens", "bad_words"),
        *("allowed_token_ids", "use_beam_search", "logits_processors", "prompt_embeds", "echo", "suffix", "best_of"),
    )
)
_UNSET = ("max_tokens", "max_completion_tokens", "seed", "top_k")  # where -1 is no value
_RENAMED = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}


def translate_generation(body: Object, ignored: set[str]) -> Object:
    """Return a body with the names and the values of this server."""
    body = dict(body)
    for theirs, ours in _RENAMED.items():
        if theirs in body:
            body.setdefault(ours, body.pop(theirs))
    for name in _UNSET:
        if body.get(name) == -1:
            del body[name]
    if body.get("stop") in ("", [""]):
        del body["stop"]
    return body


def translate_chat(body: Object, ignored: set[str]) -> Object:
    """Return a chat's body with the names and the values of this server."""
    body = translate_generation(body, ignored)
    options = template_options(body)
    if (budget := thinking_budget(body)) is not None:
        body.setdefault("thinking_budget", budget)
    for name in ("enable_thinking", "thinking", "reasoning"):
        body.pop(name, None)
    given = body.get("chat_template_kwargs") or {}
    if options and isinstance(given, dict):
        body["chat_template_kwargs"] = {**options, **given}
    structure = body.pop("structured_outputs", None)
    if not isinstance(structure, dict):
        structure = {}
    schema = body.pop("guided_json", structure.get("json"))
    pattern = body.pop("guided_regex", structure.get("regex"))
    if isinstance(schema, dict):
        body.setdefault("response_format", {"type": "json_schema", "json_schema": {"schema": schema}})
    elif isinstance(pattern, str):
        body.setdefault("response_format", {"type": "grammar", "syntax": "regex", "definition": pattern})
    return body


def translate_response(body: Object, ignored: set[str]) -> Object:
    """Return a response's body with the tools of its namespaces, and without those that OpenAI's servers run.

    The types of the latter are added to `ignored`.
    """
    if not isinstance(body.get("tools"), list):
        return body
    tools: list[Any] = []
    for tool in body["tools"]:
        match tool:
            case {"type": "namespace", "name": str(namespace), "tools": list(inner)}:
                tools += [{**part, "namespace": namespace} if isinstance(part, dict) else part for part in inner]
            case {"type": str(kind)} if kind not in ("function", "custom"):
                ignored.add(kind)
            case _:
                tools.append(tool)
    return {**body, "tools": tools}


def thinking_budget(body: Object) -> int | None:
    """Return the most tokens of reasoning that a body asks for."""
    for name, key in (("thinking", "budget_tokens"), ("reasoning", "max_tokens")):
        match body.get(name):
            case dict(options) if isinstance(tokens := options.get(key), int):
                return max(1, tokens)
    return None


def template_options(body: Object) -> Object:
    """Return what a body says about reasoning, as variables of chat templates."""
    effort, thinks = body.get("reasoning_effort"), body.get("enable_thinking")
    match body.get("reasoning"):
        case {"effort": str(name)}:
            effort = name
        case {"enabled": bool(enabled)}:
            thinks = enabled
    match body.get("thinking"):
        case {"type": str(kind)}:
            thinks = kind != "disabled"
    if effort == "none":
        return {"enable_thinking": False}
    options = {"reasoning_effort": effort, "enable_thinking": thinks}
    return {name: value for name, value in options.items() if isinstance(value, str | bool)}
