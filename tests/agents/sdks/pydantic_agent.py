"""A conversation with an agent of pydantic-ai."""

from pydantic_ai import Agent, ModelMessagesTypeAdapter
from tools import HISTORY, MODEL, TOOLS, parse_words

prompt, resume = parse_words()
agent = Agent(f"openai-chat:{MODEL}", tools=list(TOOLS.values()))
history = ModelMessagesTypeAdapter.validate_json(HISTORY.read_bytes()) if resume else None
result = agent.run_sync(prompt, message_history=history)
HISTORY.write_bytes(result.all_messages_json())
print(result.output)
