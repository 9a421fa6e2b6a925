"""A conversation with the openai SDK over /v1/responses, streamed."""

import json

import openai
from tools import HISTORY, MODEL, TOOLS, parse_words, schema_of

prompt, resume = parse_words()
items = json.loads(HISTORY.read_text()) if resume else []
items.append({"role": "user", "content": prompt})
client = openai.OpenAI()
tools = [
    {"type": "function", "name": name, "description": tool.__doc__, "parameters": schema_of(tool), "strict": True}
    for name, tool in TOOLS.items()
]
while True:
    with client.responses.stream(model=MODEL, input=items, tools=tools) as stream:
        answer = stream.get_final_response()
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        result = TOOLS[call.name](**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
HISTORY.write_text(json.dumps(items))
print(answer.output_text)
