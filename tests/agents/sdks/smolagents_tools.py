"""A conversation with a ToolCallingAgent of smolagents, which requires a call in each answer."""

import os
import pickle

from smolagents import OpenAIModel, ToolCallingAgent, tool
from tools import HISTORY, MODEL, TOOLS, parse_words

prompt, resume = parse_words()
model = OpenAIModel(MODEL, os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent([tool(function) for function in TOOLS.values()], model, max_steps=6)
if resume:
    agent.memory.steps = pickle.loads(HISTORY.read_bytes())
print(agent.run(prompt, reset=not resume))
HISTORY.write_bytes(pickle.dumps(agent.memory.steps))
