"""The openai client against mlx_tq.server: a question about a text, then a second one on the cached text.

pip install openai
mlx_tq.server &
python examples/openai_client.py
"""

import os
import sys

try:
    from openai import OpenAI
except ImportError:
    sys.stderr.write("this example needs openai: pip install openai\n")
    sys.exit(2)

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("MLX_TQ_API_KEY", "none"),
)
text = " ".join(f"House {number} has {number % 7} trees." for number in range(40))
messages = [{"role": "user", "content": f"{text} The access code is 417295. What is the access code?"}]

for question in (None, "What is the access code?"):
    if question:
        messages.append({"role": "user", "content": question})
    answer = ""
    stream = client.chat.completions.create(
        model="default_model", messages=messages, max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.choices:
            answer += chunk.choices[0].delta.content or ""
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"   ({chunk.usage.prompt_tokens} tokens of prompt, {cached} of them cached)")
    messages.append({"role": "assistant", "content": answer})
