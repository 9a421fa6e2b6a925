"""`AGENTS`: how to run each client without a terminal, and calls of its own tools that do the same three steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Answer = str | dict[str, object]  # a text, or a call: the tool's name and its arguments

DONE = "The number is 417295."
COPY = "cat notes.txt > copy.txt"
SDKS = Path(__file__).parent / "sdks"


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A client. `first` begins a conversation and `resume` continues the last one; the prompt follows as a word.

    `steps` are answers that read notes.txt in a folder, replace "alpha" by "beta" there, and copy it to copy.txt.
    `context` holds the first prompt, and not a notes.txt of 14,000 tokens `reads` times. `too_long` is what the client
    then prints, unless it goes on with less.
    """

    first: list[str]
    resume: list[str]  # {session} is the name of the newest folder that `sessions` matches
    steps: Callable[[str], list[Answer]]
    context: int
    reads: int = 1
    too_long: str = r"prompt is too long: \d+ tokens > \d+ maximum"
    sessions: str = ""
    resumes_in_terminal: str = ""  # what its screen shows, without blanks, when it waits for a prompt
    cached_share: float = 0.9  # of the prompt that resumes a conversation
    connect: str = ""  # its name for mlx_tq.connect, which writes its settings
    settings: dict[str, str] = field(default_factory=dict)  # texts of files in the home folder
    variables: Callable[[str], dict[str, str]] = field(default=lambda url: {})
    end: Callable[[str], Answer] = field(default=lambda text: text)  # of a conversation
    has_tools: bool = True


def call(name: str, **arguments: object) -> Answer:
    return {"name": name, "arguments": arguments}


def claude_steps(path: str) -> list[Answer]:
    edit = call("Edit", file_path=path, old_string="alpha", new_string="beta")
    return [call("Read", file_path=path), edit, call("Bash", command=COPY)]


def codex_steps(path: str) -> list[Answer]:
    read = call("exec_command", cmd="cat notes.txt", max_output_tokens=20_000)
    return [read, call("exec_command", cmd="sed -i s/alpha/beta/ notes.txt"), call("exec_command", cmd=COPY)]


def opencode_steps(path: str) -> list[Answer]:
    edit = call("edit", filePath=path, oldString="alpha", newString="beta")
    return [call("read", filePath=path), edit, call("bash", command=COPY)]


def pi_steps(path: str) -> list[Answer]:
    edit = call("edit", path=path, edits=[{"oldText": "alpha", "newText": "beta"}])
    return [call("read", path=path), edit, call("bash", command=COPY)]


def qwen_steps(path: str) -> list[Answer]:
    edit = call("edit", file_path=path, old_string="alpha", new_string="beta")
    return [call("read_file", file_path=path), edit, call("run_shell_command", command=COPY, is_background=False)]


def cline_steps(path: str) -> list[Answer]:
    edit = call("editor", path=path, old_text="alpha", new_text="beta")
    return [call("read_files", files=[{"path": path}]), edit, call("run_commands", commands=[COPY])]


def continue_steps(path: str) -> list[Answer]:
    edit = call("Edit", file_path=path, old_string="alpha", new_string="beta")
    return [call("Read", filepath=path), edit, call("Bash", command=COPY)]


def aider_steps(path: str) -> list[Answer]:
    """Write the file three times: after each, aider runs a test and sends the model what fails."""
    return [f"{DONE}\n\nnotes.txt\n```\n{text}\n```" for text in ("gamma", "delta", "beta")]


def sdk_steps(path: str) -> list[Answer]:
    edit = call("replace_text", path=path, old="alpha", new="beta")
    return [call("read_file", path=path), edit, call("run_command", command=COPY)]


def variables(url: str) -> dict[str, str]:
    """Return what tells the SDKs the address of the server."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "OLLAMA_HOST": url,
    }


def sdk(script: str, **options: object) -> Agent:
    words = ["sdks/bin/python", str(SDKS / f"{script}.py")]
    settings = {"variables": variables, **options}
    return Agent(first=words, resume=[*words, "--resume"], steps=sdk_steps, context=6000, **settings)


CLAUDE = ["claude", "--print", "--allowedTools=Read,Edit,Bash"]
CODEX = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
OPENCODE = ["opencode", "run", "--auto"]
PI = ["pi", "--print"]
QWEN = ["qwen", "--yolo"]
CONTINUE = ["cn", "--print", "--auto"]
AIDER = ["aider/bin/aider", "--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "notes.txt"]
AIDER += ["--auto-test", "--test-cmd", f"grep -q alpha notes.txt || (grep beta notes.txt && {COPY})", "--message"]

AGENTS = {
    "claude": Agent(
        connect="claude",
        first=CLAUDE,
        resume=[*CLAUDE, "--continue"],
        steps=claude_steps,
        context=25_000,
        too_long="Prompt is too long",
    ),
    "qwen": Agent(connect="qwen", first=QWEN, resume=[*QWEN, "--continue"], steps=qwen_steps, context=25_000),
    "pi": Agent(
        connect="pi",
        first=PI,
        resume=[*PI, "--continue"],
        steps=pi_steps,
        context=20_000,
        reads=2,
        settings={".pi/agent/settings.json": '{"compaction": {"keepRecentTokens": 5000}}'},  # less than its 20,000
    ),
    "opencode": Agent(
        connect="opencode", first=OPENCODE, resume=[*OPENCODE, "--continue"], steps=opencode_steps, context=12_000
    ),
    "codex": Agent(
        connect="codex",
        first=["codex", "exec", *CODEX],
        resume=["codex", "exec", "resume", "--last", *CODEX],
        steps=codex_steps,
        context=12_000,
        too_long="ran out of room in the model's context window",
    ),
    "cline": Agent(
        connect="cline",
        first=["cline"],
        resume=["cline", "--id", "{session}"],
        sessions=".cline/data/sessions/*",
        resumes_in_terminal="Askanything",
        steps=cline_steps,
        context=8500,
        variables=lambda url: {"CLINE_SESSION_BACKEND_MODE": "local"},
    ),
    "continue": Agent(
        connect="continue", first=CONTINUE, resume=[*CONTINUE, "--resume"], steps=continue_steps, context=8500
    ),
    "aider": Agent(
        connect="aider",
        first=AIDER,
        resume=[AIDER[0], "--restore-chat-history", *AIDER[1:]],
        steps=aider_steps,
        context=6000,
        too_long="token-limits",
        cached_share=0.3,  # it restores the conversation in front of the file's text
        has_tools=False,
    ),
    "anthropic": sdk("anthropic_messages"),
    "openai": sdk("openai_chat"),
    "openai-responses": sdk("openai_responses"),
    "ollama": sdk("ollama_chat"),
    "smolagents": sdk("smolagents_tools", end=lambda text: call("final_answer", answer=text)),
    "pydantic-ai": sdk("pydantic_agent"),
    "langchain-openai": sdk("langchain_agent", variables=lambda url: {**variables(url), "PROVIDER": "openai"}),
    "langchain-anthropic": sdk("langchain_agent", variables=lambda url: {**variables(url), "PROVIDER": "anthropic"}),
}
