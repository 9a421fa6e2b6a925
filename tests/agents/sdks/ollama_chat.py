"""A conversation with the ollama SDK, streamed."""

import json

import ollama
from tools import HISTORY, MODEL, TOOLS, parse_words

prompt, resume = parse_words()
messages = json.loads(HISTORY.read_text()) if resume else []
messages.append({"role": "user", "content": prompt})
while True:
    text, calls = "", []
    for part in ollama.chat(model=MODEL, messages=messages, tools=list(TOOLS.values()), stream=True):
        text += part.message.content or ""
        calls += part.message.tool_calls or []
    messages.append({"role": "assistant", "content": text, "tool_calls": [call.model_dump() for call in calls]})
    if not calls:
        break
    for call in calls:
        result = TOOLS[call.function.name](**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
HISTORY.write_text(json.dumps(messages))
print(text)
