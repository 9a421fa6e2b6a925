"""The embedded model in float32, where greedy choices do not depend on rounding, and a server of it."""

from contextlib import ExitStack

import pytest
from cli.tools import PACKED, float32_model
from rescue.harness import Server as RescueService

from mlx_tq.models import load

from .harness import running

FACT = "The access code is 417295."
QUESTION = f"{FACT} What is the access code?"
STEPS = ("--prefill-step-size", 2048)  # measured ones depend on the load of the machine, and rounding on them
# A bias against the end-of-text tokens of the embedded model: answers are as long as their limit.
ENDLESS = {"0": -100, "2": -100}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Save the model as a checkpoint, with embeddings for the marks that tests add to its tokenizer."""
    return float32_model(tmp_path_factory.mktemp("models") / "needle32", extra_tokens=4)


@pytest.fixture(scope="session")
def loaded(folder):
    """Return the model and its tokenizer."""
    return load(folder)


@pytest.fixture(scope="session")
def server(folder, tmp_path_factory):
    """Run a server for tests that need no settings."""
    with running(folder, tmp_path_factory.mktemp("server") / "log", *PACKED, *STEPS) as shared:
        yield shared


@pytest.fixture(scope="module")
def start(folder, tmp_path_factory):
    """Return a function that starts a server with small regions; all end with the module."""
    with ExitStack() as stack:

        def start(*flags, model=folder, steps=STEPS, **options):
            log = tmp_path_factory.mktemp("server") / "log"
            return stack.enter_context(running(model, log, *PACKED, *steps, *flags, **options))

        yield start


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Run a rescue service with keyword search only."""
    rescue_service = RescueService(tmp_path_factory.mktemp("rescue") / "data", embedder="none")
    yield rescue_service
    rescue_service.stop()


def question(count, key):
    """Return a text with a fact in it, and the question for it."""
    lines = [f"Item {n} weighs {n * 37 % 91} grams and costs {n * 13 % 29} coins." for n in range(count)]
    lines.insert(count // 2, f"The access code is {key}.")
    return "\n".join([*lines, "What is the access code?"])
