"""What travels over the wire. A chunk has two dialects: `token_range`, or the paper's `tokens` and `round`."""

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_CHUNKS = 256
MAX_TEXT = 8192
MAX_TOKENS = 65_536
MAX_POSITION = 2**40
MAX_FAULTS = 5  # errors listed in one response

SESSION_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
# NUL ends a C string: SQLite's tools and tokenizers would see only what stands before it.
TEXT_PATTERN = r"^[^\x00]*$"


def _is_whole_float(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


SessionId = Annotated[str, Field(pattern=SESSION_PATTERN, description="letters, digits, _ and -, at most 64")]
# JSON does not tell 3 from 3.0; its schemas call both integers.
WHOLE = BeforeValidator(lambda value: int(value) if _is_whole_float(value) else value)


def _convert_whole_floats(values: object) -> object:
    # Per-element validators would take a second on a large body.
    if isinstance(values, list) and len(values) <= MAX_TOKENS and float in set(map(type, values)):
        return [int(value) if _is_whole_float(value) else value for value in values]
    return values


WHOLE_FLOATS_TO_INTS = BeforeValidator(_convert_whole_floats)
Position = Annotated[int, Field(ge=0, le=MAX_POSITION)]
Token = Annotated[int, Field(ge=0, lt=MAX_POSITION)]
TokenRange = Annotated[
    list[Position],
    Field(min_length=2, max_length=2, fail_fast=True, description="[start, end) in tokens"),
    WHOLE_FLOATS_TO_INTS,
]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT, pattern=TEXT_PATTERN)]
Layer = Annotated[int, Field(ge=-1, le=100_000, description="-1: all layers share the evicted set"), WHOLE]
Score = Annotated[float, Field(allow_inf_nan=False, description="what the eviction policy thought of the span")]


class Wire(BaseModel):
    """Base of all requests: exact types, and no unknown field is silently dropped."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_excess_unknown_fields(cls, value: object) -> object:
        """Drop unknown fields beyond the number that an error reports."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields) + MAX_FAULTS:
            return value
        unknown = islice((name for name in value if name not in cls.model_fields), MAX_FAULTS)
        return {name: value[name] for name in (*unknown, *cls.model_fields) if name in value}


class Chunk(Wire):
    """An evicted span: its text and where it stood. Give `token_range` or `tokens`, not both."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["token_range"]}, {"required": ["tokens"]}]})

    text: Text
    token_range: TokenRange = Field(default=[])
    tokens: Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True), WHOLE_FLOATS_TO_INTS] = (
        Field(default=[], description="positions of the evicted tokens; the range kept is the one that holds them all")
    )
    layer: Layer = -1
    score: Score = 0.0
    round: Annotated[int, Field(ge=0, le=2**31), WHOLE] = Field(
        default=0, description="the eviction round; accepted, not kept"
    )

    @model_validator(mode="after")
    def _one_dialect(self) -> "Chunk":
        if bool(self.token_range) == bool(self.tokens):
            raise ValueError("give either token_range or tokens")
        if self.start >= self.stop:
            raise ValueError(f"token_range is [start, end) with start < end, not {self.token_range}")
        return self

    @property
    def start(self) -> int:
        """First position of the span."""
        return self.token_range[0] if self.token_range else min(self.tokens)

    @property
    def stop(self) -> int:
        """Position after the last of the span."""
        return self.token_range[1] if self.token_range else max(self.tokens) + 1


class WriteRequest(Wire):
    """Spans to keep. The session is named here or in the query string."""

    session_id: SessionId | None = None
    chunks: Annotated[list[Chunk], Field(min_length=1, max_length=MAX_CHUNKS, fail_fast=True)]


class WriteAnswer(BaseModel):
    """The spans are on disk when this arrives."""

    accepted: int = Field(description="spans of this call that were not yet kept")
    session_total: int


class RetrieveRequest(Wire):
    """A question, and how to look for what answers it."""

    session_id: SessionId | None = None
    query: Text
    top_k: Annotated[int, Field(ge=1, le=64), WHOLE] = 8
    score_floor: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)] | None = Field(
        default=0.0,
        description="least similarity; null: the embedder's own floor, for spans of a sentence or two. "
        "On whole turns of a chat it costs recall (R@50 from .302 to .249)",
    )
    hybrid_alpha: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=0.6, description="weight of the dense score; 0 is BM25 alone, 1 dense alone"
    )
    exclude_ranges: Annotated[list[TokenRange], Field(max_length=4096, fail_fast=True)] = Field(
        default=[], description="a span that lies wholly in these is left out: it is still in the cache"
    )
    join: bool = Field(default=True, description="spans that touch are one chunk; false: each by itself")


class FoundChunk(BaseModel):
    """One stretch of text that was found: a span, or neighbouring ones that were joined."""

    text: str
    token_range: TokenRange
    layer: int
    score: float
    similarity: float = Field(description="dense cosine, or BM25 over its best hit where there is no dense vector")
    dense: float | None = Field(description="cosine; null without a vector")
    bm25: float | None = Field(description="BM25 over the best hit; null where no word matched")


class RetrieveAnswer(BaseModel):
    """What was found, best first, and by which means."""

    chunks: list[FoundChunk]
    session_total: int
    mode: Literal["hybrid", "dense", "bm25"]
    degraded: str | None = Field(description="why dense scores were wanted and missing, else null")


class EmbedRequest(Wire):
    """Texts that are not kept."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHUNKS, fail_fast=True)]


class EmbedAnswer(BaseModel):
    """A unit vector for each text, in their order."""

    model: str = Field(description="the embedder; vectors of different ones cannot be compared")
    vectors: list[list[float]]


class DumpAnswer(BaseModel):
    """Where a session's spans stood, in the order of writing."""

    session_id: str
    session_total: int
    token_ranges: list[TokenRange]
    layers: list[int]
    scores: list[float]


class ShownSpan(BaseModel):
    """A span as it was written."""

    text: str
    token_range: TokenRange
    layer: int
    score: float


class SpansAnswer(BaseModel):
    """Some of a session's spans, in the order of writing."""

    session_id: str
    session_total: int
    first: int = Field(description="how many spans stand before these")
    spans: list[ShownSpan]


class SessionInfo(BaseModel):
    """A session as the list shows it."""

    session_id: str
    session_total: int
    embedded: int = Field(description="spans with a vector of the embedder in use")
    text_bytes: int
    created: float = Field(description="seconds since 1970")
    updated: float
    resident: bool = Field(description="its index is in memory")


class SessionList(BaseModel):
    """All sessions, the last written first."""

    sessions: list[SessionInfo]


class ForgetAnswer(BaseModel):
    """No byte of the session's text is left in the database, its log or the index."""

    session_id: str
    forgotten: int


class ResidenceAnswer(BaseModel):
    """Whether a session's index is in memory now."""

    session_id: str
    resident: bool
    vectors: int


class EmbedderInfo(BaseModel):
    """State of the embedder."""

    name: str
    state: Literal["off", "unavailable", "idle", "starting", "ready"]
    reason: str | None
    pending: int = Field(description="spans that still wait for their vector")


class HealthAnswer(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"
    version: str


class ReadyAnswer(BaseModel):
    """The store answers, and by which means retrieval works."""

    status: Literal["ready"] = "ready"
    retrieval: Literal["hybrid", "bm25"]
    embedder: EmbedderInfo
    index: Literal["faiss", "numpy", "hnsw", "exact"]
    sessions: int
    spans: int


class ErrorAnswer(BaseModel):
    """Every answer that is not a success."""

    detail: str
    code: str
    request_id: str


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the error answers of a route for the OpenAPI document."""
    return {status: {"model": ErrorAnswer} for status in statuses}
