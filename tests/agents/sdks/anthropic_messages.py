"""A conversation with the anthropic SDK, streamed."""

import json

import anthropic
from tools import HISTORY, MODEL, TOOLS, parse_words, schema_of

prompt, resume = parse_words()
messages = json.loads(HISTORY.read_text()) if resume else []
messages.append({"role": "user", "content": prompt})
client = anthropic.Anthropic()
tools = [
    {"name": name, "description": tool.__doc__, "input_schema": schema_of(tool), "cache_control": {"type": "ephemeral"}}
    for name, tool in TOOLS.items()
]
while True:
    with client.messages.stream(model=MODEL, max_tokens=1000, messages=messages, tools=tools) as stream:
        answer = stream.get_final_message()
    messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
    if answer.stop_reason != "tool_use":
        break
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": TOOLS[block.name](**block.input)}
        for block in answer.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
HISTORY.write_text(json.dumps(messages))
print(answer.content[0].text)
