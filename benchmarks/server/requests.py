"""Requests of the official client, what OpenAI documents for each, and how to compare the outcome.

A request's `ask` returns None for the documented outcome, else a few words. The outcome of an error is its status.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openai
import pydantic

QUESTION = "The access code is 417295. What is the access code?"
SCHEMA = {
    "type": "object",
    "properties": {"code": {"type": "string", "maxLength": 6}},
    "required": ["code"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
COLOR = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}}, "required": ["color"]}
PAINT = {"type": "function", "function": {"name": "paint", "parameters": COLOR}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
MODEL = "default_model"


class Code(pydantic.BaseModel):
    code: str


@dataclass(frozen=True)
class Request:
    """One request; `why` is the reason if our answer differs from `documented`."""

    name: str
    documented: str
    ask: Callable[[openai.OpenAI], str]
    why: str = ""


def chat(client, *messages, **options):
    """Return a chat's answer; a message that is only text is the user's, and the default is the question."""
    sent = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages or [QUESTION]]
    return client.chat.completions.create(**{"model": MODEL, "messages": sent, "max_tokens": 12, **options})


def text(answer):
    return answer.choices[0].message.content or ""


def seen(ok, otherwise="something else"):
    """Return None if the outcome is as documented, else the words."""
    return None if ok else otherwise


def answers(*messages, **options):
    return lambda client: seen(isinstance(text(chat(client, *messages, **options)), str))


def chunks(client, **options):
    return list(chat(client, stream=True, **options))


def streams(client):
    """Check that the role comes first and the finish reason last."""
    received = chunks(client)
    first, last = received[0].choices[0], received[-1].choices[0]
    return seen(first.delta.role == "assistant" and last.finish_reason == "stop" and not first.finish_reason)


def counts(client):
    """Check that the last chunk has the usage and no choices, and the others have no usage."""
    *before, last = chunks(client, stream_options={"include_usage": True})
    return seen(not last.choices and last.usage.total_tokens and all(chunk.usage is None for chunk in before))


def indexes(client):
    """Check that chunks name their choice."""
    return seen({choice.index for chunk in chunks(client, n=2) for choice in chunk.choices} == {0, 1}, "one choice")


def schema_of(client, **more):
    schema = {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA, "strict": True}}
    try:
        return seen(set(json.loads(text(chat(client, response_format=schema, max_tokens=60, **more)))) == {"code"})
    except ValueError:
        return "text that is no JSON"


def an_object(client):
    answer = text(chat(client, response_format={"type": "json_object"}, max_tokens=12))
    return seen(answer.startswith("{"), "text that is no JSON")


def parsed(client):
    """Check that the client's `parse` accepts an answer."""
    parsed_answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_format=Code, max_tokens=200,
        extra_body={"temperature": 0},
    )  # fmt: skip
    return seen(isinstance(parsed_answer.choices[0].message.parsed, Code))


def events(client):
    """Check the first and the last event of a response."""
    types = [event.type for event in client.responses.create(model=MODEL, input=QUESTION, stream=True)]
    return seen((types[0], types[-1]) == ("response.created", "response.completed"))


def compacts(client):
    """Check that a conversation becomes its user messages and a summary."""
    compacted = client.responses.compact(model=MODEL, input=QUESTION, extra_body={"max_output_tokens": 12})
    return seen([item.type for item in compacted.output] == ["message", "compaction"])


def logprobs(client):
    """Check that each token has its two most likely ones."""
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    return seen(all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in content))


def same(**options):
    return lambda client: seen(text(chat(client, **options)) == text(chat(client, **options)))


def ends_before(stop):
    return lambda client: seen(text(chat(client, stop=stop)) == "4172")


def calls(client, tools, choice):
    """Check that an answer has a call of a tool, with arguments that its schema allows."""
    made = chat(client, tools=tools, tool_choice=choice, max_tokens=60).choices[0].message.tool_calls
    if not made:
        return "text"
    allowed = {"look_up": [{}], "paint": [{"color": "red"}, {"color": "green"}]}
    return seen(json.loads(made[0].function.arguments) in allowed[made[0].function.name])


def completes(prompt, count):
    def ask(client):
        choices = client.completions.create(model=MODEL, max_tokens=4, prompt=prompt).choices
        return seen(len(choices) == count and all(isinstance(choice.text, str) for choice in choices), "one choice")

    return ask


def models(client):
    return seen(client.models.retrieve(client.models.list().data[0].id).id)


def responds(client):
    return seen("417295" in client.responses.create(model=MODEL, input=QUESTION).output_text)


def _finish(reason, **options):
    return lambda client: seen(chat(client, **options).choices[0].finish_reason == reason)


def _usage(client):
    usage = chat(client).usage
    return seen(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0)


def _raw(client):
    client.post("/chat/completions", body={"model": MODEL}, cast_to=dict)
    return "something else"


CUT = "`finish_reason` is `length`"
ANY = "an answer"
LOOSE = "clients of other servers send it"
R = Request
REQUESTS = [
    R("a question", "an answer that ends with `stop`", _finish("stop")),
    R("its usage", "prompt and answer make the total", _usage),
    R("`stream`", "the role first, `finish_reason` last", streams),
    R("`stream_options.include_usage`", "one more chunk, with the usage alone", counts),
    R("`max_tokens`", CUT, _finish("length", max_tokens=2)),
    R("`max_completion_tokens`", CUT, _finish("length", max_tokens=openai.omit, max_completion_tokens=2)),
    R("more `max_tokens` than the model allows", "400", answers(max_tokens=10**6),
      "cut to what is left, as `X-Max-Tokens` says: clients of other servers send their largest number"),
    R("`stop`, a text", "the answer ends before it", ends_before("95")),
    R("`stop`, four texts", "the answer ends before one", ends_before(["x", "y", "z", "95"])),
    R("`temperature` 0", "twice the same", same(temperature=0)),
    R("`seed`", "twice the same", same(temperature=1, seed=7)),
    R("`temperature` 3", "400", answers(temperature=3), LOOSE),
    R("`top_p`, penalties", ANY, answers(top_p=0.5, presence_penalty=0.5, frequency_penalty=0.5)),
    R("`logit_bias`", "the token is said", lambda c: seen(text(chat(c, max_tokens=1, logit_bias={"300": 100})) != "4")),
    R("`n`", "so many choices", lambda c: seen(len(chat(c, n=2).choices) == 2, "one choice")),
    R("`n` in a stream", "chunks carry `index`", indexes),
    R("`logprobs`, `top_logprobs`", "each token with its likeliest", logprobs),
    R("JSON mode", "JSON", an_object),
    R("a JSON schema", "what it describes", schema_of),
    R("`parse` of a pydantic model", "an object of it", parsed),
    R("a schema that is none", "400", lambda c: answers(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}})(c)),
    R("parts of text", ANY, answers({"role": "user", "content": [{"type": "text", "text": QUESTION}]})),
    R("a picture, which the model cannot see", "400", answers(
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]})),
    R("`developer` and `system`", ANY, answers({"role": "developer", "content": "Be kind."}, QUESTION)),
    R("a call without words, and what it gave", ANY, answers(
        QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "417295"})),
    R("`tools`", "an answer or a call", answers(tools=[TOOL]),
      "the embedded model's template shows none, so that they would be ignored; where a template does, they are taken"),
    R("`tool_choice` required", "a call", lambda c: calls(c, [TOOL, PAINT], "required")),
    R("`tool_choice` of a function", "a call of it", lambda c: calls(
        c, [PAINT], {"type": "function", "function": {"name": "paint"}})),
    R("no messages", "400", lambda c: seen(c.chat.completions.create(model=MODEL, messages=[]) is None)),
    R("a role that is none", "400", answers({"role": "king", "content": "hi"})),
    R("a body without messages", "400", _raw),
    R("another model", ANY, answers(model="gpt-9")),
    R("an argument that is none", ANY, answers(extra_body={"temprature": 1})),
    R("`user`, `metadata`, `store`, `service_tier`", ANY, answers(
        user="me", metadata={"a": "b"}, store=False, service_tier="auto")),
    R("`reasoning_effort`", ANY, answers(reasoning_effort="low")),
    R("a completion", "its text", completes("The sky is", 1)),
    R("a completion of token ids", "its text", completes([300, 301, 302], 1)),
    R("several prompts", "a choice for each", completes(["a", "b"], 2)),
    R("`models.list`, `models.retrieve`", "the model", models),
    R("`responses.create`", "its text", responds),
    R("`responses.create`, a stream", "from `response.created` to `response.completed`", events),
    R("`responses.compact`", "the user messages, and a summary", compacts),
    R("`previous_response_id` of none that is kept", "400", lambda c: seen(
        c.responses.create(model=MODEL, input="hi", previous_response_id="resp_1") is None)),
]  # fmt: skip


def outcome(request: Request, client: openai.OpenAI) -> tuple[bool, str]:
    """Return whether the outcome is as documented, and the outcome."""
    try:
        words: Any = request.ask(client)
    except openai.APIStatusError as error:
        status = str(error.status_code)
        return request.documented.startswith(status), status
    except openai.OpenAIError as error:
        words = f"the client fails ({type(error).__name__})"
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        words = f"the client cannot read it ({type(error).__name__})"
    if words is None and request.documented[:3] in ("400", "404"):
        words = "an answer"
    return words is None, words or request.documented
