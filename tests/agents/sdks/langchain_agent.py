"""A conversation with an agent of LangChain, over the API that PROVIDER names."""

import json
import os

from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.messages import HumanMessage, messages_from_dict, messages_to_dict
from tools import HISTORY, MODEL, TOOLS, parse_words

prompt, resume = parse_words()
model = init_chat_model(MODEL, model_provider=os.environ["PROVIDER"], max_tokens=1000)
agent = create_agent(model, list(TOOLS.values()))
earlier = messages_from_dict(json.loads(HISTORY.read_text())) if resume else []
messages = agent.invoke({"messages": [*earlier, HumanMessage(prompt)]})["messages"]
HISTORY.write_text(json.dumps(messages_to_dict(messages)))
print(messages[-1].text)
