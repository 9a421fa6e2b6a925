"""Fields that clients of other servers send: what they mean here, and which are refused because they mean too much."""

from typing import Any

from pydantic_core import from_json

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
_STRUCTURES = ("structured_outputs", "guided_json", "guided_regex")
_RENAMED = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}


def translate_generation(body: Object, ignored: set[str]) -> Object:
    """Return a body with the names and the values of this server."""
    body = dict(body)
    for theirs, ours in _RENAMED.items():
        if (value := body.pop(theirs, None)) is not None and body.get(ours) is None:
            body[ours] = value
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
    if (budget := thinking_budget(body)) is not None and body.get("thinking_budget") is None:
        body["thinking_budget"] = budget
    for name in ("enable_thinking", "thinking", "reasoning"):
        body.pop(name, None)
    given = body.get("chat_template_kwargs") or {}
    if options and isinstance(given, dict):
        body["chat_template_kwargs"] = {**options, **given}
    if body.get("response_format") is None and (structure := _response_format(body)) is not None:
        body["response_format"] = structure
    for name in _STRUCTURES:
        body.pop(name, None)
    return body


def _response_format(body: Object) -> Object | None:
    """Return the format that a body asks for in vLLM's fields; raise ValueError for one that is not supported."""
    structure = body.get("structured_outputs") or {}
    if not isinstance(structure, dict):
        raise ValueError("structured_outputs: Input should be an object")
    if other := [name for name, value in structure.items() if value and name not in ("json", "regex")]:
        raise ValueError(f"structured_outputs.{other[0][:64]}: unsupported; use json or regex")
    schema = body.get("guided_json") or structure.get("json")
    if isinstance(schema, str):
        schema = from_json(schema)
    if isinstance(schema, dict):
        return {"type": "json_schema", "json_schema": {"schema": schema}}
    if schema is not None:
        raise ValueError("guided_json: Input should be a JSON schema")
    pattern = body.get("guided_regex") or structure.get("regex")
    return None if pattern is None else {"type": "grammar", "syntax": "regex", "definition": pattern}


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
            case dict(options) if type(tokens := options.get(key)) is int:
                return min(max(1, tokens), 2**31 - 1)
    return None


def template_options(body: Object) -> Object:
    """Return what a body says about reasoning, as variables of chat templates."""
    reasoning, thinking = (
        value if isinstance(value := body.get(name), dict) else {} for name in ("reasoning", "thinking")
    )
    effort = reasoning.get("effort") or body.get("reasoning_effort")
    thinks = reasoning.get("enabled", body.get("enable_thinking"))
    if isinstance(thinking.get("type"), str):
        thinks = thinking["type"] != "disabled"
    if effort == "none" or thinks is False:
        return {"enable_thinking": False}
    options: Object = {"reasoning_effort": effort} if isinstance(effort, str) else {}
    return options | ({"enable_thinking": True} if thinks is True else {})
