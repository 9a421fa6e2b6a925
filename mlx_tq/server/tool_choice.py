"""`ToolChoice`: which tools a request allows, and whether one has to be called; the order of keys in tools."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo

_MODES = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
_MAX_NAME = 100  # characters of a name that an error repeats
_VALID = (
    '\'none\', \'auto\', \'required\', {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
)


_LEADING_KEYS = ("type", "function", "name", "description", "parameters", "properties", "items", "enum", "required")
_KEY_RANKS = {key: rank for rank, key in enumerate(_LEADING_KEYS)}


class ToolChoice(BaseModel):
    """`names` are the tools that may be called; None allows all."""

    model_config = ConfigDict(strict=True)

    mode: Literal["none", "auto", "required"]
    names: list[str] | None = None

    @property
    def has_one_call(self) -> bool:
        """Whether a tool is named, which is then called once."""
        return self.mode == "required" and self.names is not None and len(self.names) == 1


def _read(value: Any) -> Any:
    """Return the choice that a value of OpenAI's APIs stands for."""
    if value is None or isinstance(value, ToolChoice):
        return value
    if isinstance(value, str) and value in _MODES:
        return {"mode": _MODES[value]}
    if isinstance(value, dict):
        options = inner if isinstance(inner := value.get("allowed_tools"), dict) else value
        kind, tools = value.get("type"), options.get("tools")
        if isinstance(kind, str) and kind in _MODES:
            return {"mode": _MODES[kind]}
        if kind in ("function", "custom") and (name := _name(value)):
            return {"mode": "required", "names": [name]}
        if kind == "allowed_tools" and options.get("mode") in ("auto", "required") and isinstance(tools, list):
            names = [_name(tool) for tool in tools]
            if names and all(names):
                return {"mode": options["mode"], "names": names}
    raise ValueError(f"should be {_VALID}")


def _name(tool: Any) -> str | None:
    """Return the name in {"function": {"name": ...}}, or in {"name": ...}, which may have a namespace."""
    if not isinstance(tool, dict):
        return None
    kind = tool.get("type", "function")
    parts = inner if isinstance(kind, str) and isinstance(inner := tool.get(kind), dict) else tool
    name, namespace = parts.get("name"), parts.get("namespace")
    if not isinstance(name, str) or not name:
        return None
    return f"{namespace}__{name}" if isinstance(namespace, str) else name


def _check_names(choice: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
    """Raise `ValueError` if the request does not have the tools of its choice."""
    if choice is None or "tools" not in info.data or (choice.mode != "required" and choice.names is None):
        return choice
    tool_names = [tool.function.get("name") for tool in info.data["tools"] or []]
    if not tool_names:
        raise ValueError("needs tools in the request; send tools, or omit tool_choice")
    if unknown := [name for name in choice.names or [] if name not in tool_names]:
        names = ", ".join(str(name)[:_MAX_NAME] for name in tool_names[:20])
        raise ValueError(f"{unknown[0][:_MAX_NAME]!r} is not one of the tools: {names}")
    return choice


ToolChoiceField = Annotated[ToolChoice | None, BeforeValidator(_read), AfterValidator(_check_names)]


def with_sorted_keys(value: Any) -> Any:
    """Sort the keys of JSON objects: clients send schemas in other orders, with which no prefix would be shared."""
    if isinstance(value, list):
        return [with_sorted_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    keys = sorted(value, key=lambda key: (_KEY_RANKS.get(key, len(_KEY_RANKS)), key))
    return {key: with_sorted_keys(value[key]) for key in keys}
