"""`CLIENTS`: coding agents, and the settings with which each uses a server.

Each was checked against the client's own documentation or source, and by a run: the versions are in
docs/guides/coding_agents.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_tq.cli.options import API_KEY_VARIABLE
from mlx_tq.clients.endpoint import NO_KEY, Endpoint

MakeSettings = Callable[[Endpoint], dict[str, Any]]

_PROVIDER = "mlx_tq"
# Claude Code does not compact windows below 100,000 tokens. For a shorter context we set 200,000, and the server must
# run with --scale-usage 200000.
_LEAST_CLAUDE_WINDOW, _SCALED_CLAUDE_WINDOW = 100_000, 200_000
_TIMEOUT_MS = 1_800_000  # a long prompt takes minutes to prefill, and clients give up after 2 to 10


@dataclass(frozen=True)
class ConfigFolder:
    """A folder with a client's configuration files.

    `variable` moves it elsewhere: it names the folder, or its only file if `names_file` is set. `if_moved` are
    variables that the client needs then.
    """

    path: str
    variable: str
    files: dict[str, MakeSettings]
    names_file: bool = False
    if_moved: dict[str, str] = field(default_factory=dict)

    def paths(self, environment: Mapping[str, str]) -> dict[Path, MakeSettings]:
        """Return where the client reads its files."""
        place = environment.get(self.variable)
        if place and self.names_file:
            return {Path(place).expanduser(): settings for settings in self.files.values()}
        settings_home = environment.get("XDG_CONFIG_HOME") or "~/.config"
        folder = Path(place or self.path.replace("~/.config", settings_home)).expanduser()
        return {folder / name: settings for name, settings in self.files.items()}

    def moved_to(self, folder: Path) -> dict[str, str]:
        """Return the variables that make the client read its files in `folder`."""
        place = folder / next(iter(self.files)) if self.names_file else folder
        return {self.variable: str(place), **self.if_moved}


@dataclass(frozen=True)
class CodingClient:
    """A client; `unset` are variables that would send its requests elsewhere."""

    title: str
    program: str
    install: str
    environment: Callable[[Endpoint], dict[str, str]] = field(default=lambda _: {})
    unset: tuple[str, ...] = ()
    folder: ConfigFolder | None = None

    def files(self, server: Endpoint, environment: Mapping[str, str]) -> dict[Path, dict[str, Any]]:
        """Return the settings of the client's files, by where it reads them."""
        paths = {} if self.folder is None else self.folder.paths(environment)
        return {path: settings(server) for path, settings in paths.items()}

    def moved_to(self, folder: Path) -> dict[str, str]:
        return {} if self.folder is None else self.folder.moved_to(folder)


def _claude(server: Endpoint) -> dict[str, str]:
    kinds = ("OPUS", "SONNET", "HAIKU")
    window = server.context_length if server.context_length >= _LEAST_CLAUDE_WINDOW else _SCALED_CLAUDE_WINDOW
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key or NO_KEY,
        "ANTHROPIC_MODEL": server.model,
        **{f"ANTHROPIC_DEFAULT_{kind}_MODEL": server.model for kind in kinds},
        "ANTHROPIC_SMALL_FAST_MODEL": server.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.output_tokens),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(window),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it begins each system prompt with another hash, so no prefix is shared
        "ENABLE_TOOL_SEARCH": "false",  # which only Anthropic's server has
        "API_TIMEOUT_MS": str(_TIMEOUT_MS),
    }


def _codex(server: Endpoint) -> dict[str, Any]:
    provider = {
        "name": _PROVIDER,
        "base_url": server.api_url,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _TIMEOUT_MS,
        **({"env_key": API_KEY_VARIABLE} if server.key else {}),
    }
    return {
        "model": server.model,
        "model_provider": _PROVIDER,
        "model_context_window": server.context_length,
        "model_providers": {_PROVIDER: provider},
    }


def _opencode(server: Endpoint) -> dict[str, Any]:
    alias = server.model.replace("/", "-")  # it takes what is before a "/" for a provider
    key = f"{{env:{API_KEY_VARIABLE}}}" if server.key else NO_KEY
    limit = {"context": server.context_length, "output": server.output_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _PROVIDER,
        "options": {"baseURL": server.api_url, "apiKey": key, "timeout": _TIMEOUT_MS},
        "models": {alias: {"id": server.model, "name": server.model, "limit": limit}},
    }
    model = f"{_PROVIDER}/{alias}"
    return {"model": model, "small_model": model, "provider": {_PROVIDER: provider}}


def _pi_models(server: Endpoint) -> dict[str, Any]:
    model = {"id": server.model, "contextWindow": server.context_length, "maxTokens": server.output_tokens}
    provider = {
        "baseUrl": server.api_url,
        "api": "openai-completions",
        "apiKey": API_KEY_VARIABLE if server.key else NO_KEY,
        "models": [model],
    }
    return {"providers": {_PROVIDER: provider}}


def _qwen(server: Endpoint) -> dict[str, Any]:
    model = {
        "id": server.model,
        "name": server.model,
        "baseUrl": server.api_url,
        "envKey": API_KEY_VARIABLE,
        "generationConfig": {
            "contextWindowSize": server.context_length,
            "timeout": _TIMEOUT_MS,
            "samplingParams": {"max_tokens": server.output_tokens},
        },
    }
    return {
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": server.model},
        **({} if server.key else {"env": {API_KEY_VARIABLE: NO_KEY}}),
    }


def _cline(server: Endpoint) -> dict[str, Any]:
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "apiKey": server.key or NO_KEY,
        "model": server.model,
        "baseUrl": server.api_url,
        "contextWindow": server.context_length,
        "maxTokens": server.output_tokens,
        "timeout": _TIMEOUT_MS,
    }
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    return {"version": 1, "lastUsedProvider": provider, "providers": {provider: entry}}


def _aider(server: Endpoint) -> dict[str, str]:
    key = server.key or NO_KEY
    return {"AIDER_MODEL": _aider_model(server), "OPENAI_API_BASE": server.api_url, "OPENAI_API_KEY": key}


def _aider_model(server: Endpoint) -> str:
    return f"openai/{server.model}"


def _aider_models(server: Endpoint) -> dict[str, Any]:
    model = {
        "max_input_tokens": server.context_length,
        "max_output_tokens": server.output_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    return {_aider_model(server): model}


def _continue(server: Endpoint) -> dict[str, Any]:
    model = {
        "name": server.model,
        "provider": "openai",
        "model": server.model,
        "apiBase": server.api_url,
        "apiKey": server.key or NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "defaultCompletionOptions": {"contextLength": server.context_length, "maxTokens": server.output_tokens},
        "requestOptions": {"timeout": _TIMEOUT_MS},
    }
    return {"name": "Local config", "version": "1.0.0", "schema": "v1", "models": [model]}


CLIENTS = {
    "claude": CodingClient(
        "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude, unset=("ANTHROPIC_API_KEY",)
    ),
    "codex": CodingClient(
        "Codex",
        "codex",
        "npm install -g @openai/codex",
        folder=ConfigFolder("~/.codex", "CODEX_HOME", {"config.toml": _codex}),
    ),
    "opencode": CodingClient(
        "opencode",
        "opencode",
        "npm install -g opencode-ai",
        folder=ConfigFolder("~/.config/opencode", "OPENCODE_CONFIG", {"opencode.json": _opencode}, names_file=True),
    ),
    "pi": CodingClient(
        "pi",
        "pi",
        "npm install -g @earendil-works/pi-coding-agent",
        folder=ConfigFolder(
            "~/.pi/agent",
            "PI_CODING_AGENT_DIR",
            {
                "models.json": _pi_models,
                "settings.json": lambda server: {"defaultProvider": _PROVIDER, "defaultModel": server.model},
            },
        ),
    ),
    "qwen": CodingClient(
        "Qwen Code",
        "qwen",
        "npm install -g @qwen-code/qwen-code",
        folder=ConfigFolder("~/.qwen", "QWEN_HOME", {"settings.json": _qwen}),
    ),
    "cline": CodingClient(
        "Cline",
        "cline",
        "npm install -g cline",
        folder=ConfigFolder(
            "~/.cline/data/settings",
            "CLINE_PROVIDER_SETTINGS_PATH",
            {"providers.json": _cline},
            names_file=True,
            if_moved={"CLINE_SESSION_BACKEND_MODE": "local"},  # else a daemon keeps the settings beyond the run
        ),
    ),
    "aider": CodingClient(
        "aider",
        "aider",
        "pip install aider-chat",
        _aider,
        folder=ConfigFolder(
            "~", "AIDER_MODEL_METADATA_FILE", {".aider.model.metadata.json": _aider_models}, names_file=True
        ),
    ),
    "continue": CodingClient(
        "Continue",
        "cn",
        "npm install -g @continuedev/cli",
        folder=ConfigFolder("~/.continue", "CONTINUE_GLOBAL_DIR", {"config.yaml": _continue}),
    ),
}
