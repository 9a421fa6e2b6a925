"""A conversation with the openai SDK over /v1/chat/completions, streamed."""

import json

import openai
from tools import HISTORY, MODEL, TOOLS, parse_words, schema_of

prompt, resume = parse_words()
messages = json.loads(HISTORY.read_text()) if resume else []
messages.append({"role": "user", "content": prompt})
client = openai.OpenAI()
tools = [
    {"type": "function", "function": {"name": name, "description": tool.__doc__, "parameters": schema_of(tool)}}
    for name, tool in TOOLS.items()
]
while True:
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
        message = stream.get_final_completion().choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
HISTORY.write_text(json.dumps(messages))
print(message.content)
