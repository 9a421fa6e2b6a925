"""The chat page of a model that writes given texts, at an address of its own."""

from contextlib import contextmanager
from threading import Thread

import uvicorn
from http_harness import wait_for

from .test_broken_answers import api_of
from .test_tool_calls import NO_THINKING, scripting


@contextmanager
def listening(app):
    """Serve an ASGI application; yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def scripted_site(loaded, tokenizer, *flags):
    """Yield a `Scripted` whose `url` is that of its chat page."""
    with (
        scripting(loaded) as site,
        api_of((loaded[0], tokenizer), *NO_THINKING, *flags) as (api, start),
        listening(api.app([], start)) as site.url,
    ):
        yield site
