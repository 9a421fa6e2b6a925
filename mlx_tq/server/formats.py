"""From a request's `response_format` to what holds its answer to it."""

from mlx_tq.commands.grammar import Constraint, GrammarError, Grammars
from mlx_tq.server.errors import InvalidRequestError
from mlx_tq.server.schemas import ChatRequest, ObjectFormat, SchemaFormat, TextFormat

_PARAM = "response_format"


def constraint_of(request: ChatRequest, grammars: Grammars, *, thinks: bool) -> Constraint | None:
    """What the answer is held to; None where it may be any text.

    Args:
        request: as it came.
        grammars: of the model's tokenizer.
        thinks: the model's thoughts come first.

    Raises:
        InvalidRequestError: a schema or grammar that cannot be followed, or tools beside it.
    """
    asked = request.response_format
    if asked is None or isinstance(asked, TextFormat):
        return None
    if request.tools and request.tool_choice != "none":
        raise InvalidRequestError("tools and response_format exclude each other; send one of them", _PARAM)
    if request.prefill is not None:
        raise InvalidRequestError("an answer that is begun cannot be held to a response_format; leave one out", _PARAM)
    where = f"{_PARAM}.definition"
    try:
        if isinstance(asked, ObjectFormat):
            where = f"{_PARAM}.schema"
            return grammars.of_schema(asked.described_by or {"type": "object"}, thinks=thinks)
        if isinstance(asked, SchemaFormat):
            where = f"{_PARAM}.json_schema.schema"
            return grammars.of_schema(asked.json_schema.described_by, thinks=thinks)
        return grammars.of_text(asked.syntax, asked.definition, thinks=thinks)
    except GrammarError as error:
        where = ".".join([where, *error.place])
        raise InvalidRequestError(f"{where}: {error}", where) from error
