"""Request and response bodies. A chunk has two forms: `token_range`, or `tokens` and `round` as in TriAttention."""

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_CHUNKS = 256
MAX_TEXT = 8192
MAX_TOKENS = 65_536
MAX_POSITION = 2**40
MAX_FAULTS = 5  # errors listed in one response


def _convert_whole_float(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _convert_whole_floats(values: object) -> object:
    # Per-element validators would take a second on a large body.
    if isinstance(values, list) and len(values) <= MAX_TOKENS and float in set(map(type, values)):
        return list(map(_convert_whole_float, values))
    return values


# JSON does not tell 3 from 3.0; its schemas call both integers.
WHOLE, WHOLE_FLOATS_TO_INTS = BeforeValidator(_convert_whole_float), BeforeValidator(_convert_whole_floats)
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="letters, digits, _ and -, at most 64")]
Position = Annotated[int, Field(ge=0, le=MAX_POSITION)]
Token = Annotated[int, Field(ge=0, lt=MAX_POSITION)]
TokenRange = Annotated[
    list[Position],
    Field(min_length=2, max_length=2, fail_fast=True, description="[start, end) in tokens"),
    WHOLE_FLOATS_TO_INTS,
]
# NUL ends a C string: SQLite's tools and tokenizers would see only the text before it.
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT, pattern=r"^[^\x00]*$")]


class RequestBody(BaseModel):
    """Base of all requests: exact types, and an unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_excess_unknown_fields(cls, value: object) -> object:
        """Drop unknown fields beyond the number that an error reports."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields) + MAX_FAULTS:
            return value
        unknown = islice((name for name in value if name not in cls.model_fields), MAX_FAULTS)
        return {name: value[name] for name in (*unknown, *cls.model_fields) if name in value}


class Chunk(RequestBody):
    """An evicted span: its text and positions. Give `token_range` or `tokens`, not both."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["token_range"]}, {"required": ["tokens"]}]})

    text: Text
    token_range: TokenRange = Field(default=[])
    tokens: Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True), WHOLE_FLOATS_TO_INTS] = (
        Field(
            default=[], description="positions of the evicted tokens; the smallest range that contains them is stored"
        )
    )
    layer: Annotated[int, Field(ge=-1, le=100_000, description="-1: evicted in all layers"), WHOLE] = -1
    score: float = Field(default=0.0, allow_inf_nan=False, description="score of the eviction policy")
    round: Annotated[int, Field(ge=0, le=2**31), WHOLE] = Field(
        default=0, description="the eviction round; accepted, not stored"
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
        return self.token_range[0] if self.token_range else min(self.tokens)

    @property
    def stop(self) -> int:
        return self.token_range[1] if self.token_range else max(self.tokens) + 1


class WriteRequest(RequestBody):
    """Spans to store. The session is named here or in the query string."""

    session_id: SessionId | None = None
    temporary: bool = Field(
        default=False,
        description="delete the session `session_lifetime_s` after its last write or renewal, "
        "as long as all writes to it say so",
    )
    chunks: Annotated[list[Chunk], Field(min_length=1, max_length=MAX_CHUNKS, fail_fast=True)]


class WriteResponse(BaseModel):
    """The spans are on disk when this arrives."""

    accepted: int = Field(description="spans of this call that are new")
    session_total: int


class RetrieveRequest(RequestBody):
    session_id: SessionId | None = None
    query: Text
    top_k: Annotated[int, Field(ge=1, le=64), WHOLE] = 8
    score_floor: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)] | None = Field(
        default=0.0,
        description="minimum similarity; null: the embedder's own floor, for spans of a sentence or two. "
        "For whole turns of a chat that floor lowers recall (R@50 from .302 to .249)",
    )
    hybrid_alpha: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=0.6, description="weight of the dense score; 0 is BM25 alone, 1 dense alone"
    )
    exclude_ranges: Annotated[list[TokenRange], Field(max_length=4096, fail_fast=True)] = Field(
        default=[], description="spans inside one of these ranges are left out because they are still in the cache"
    )
    join: bool = Field(default=True, description="join adjacent spans to one chunk")


class StoredSpan(BaseModel):
    """A span as it was written."""

    text: str
    token_range: TokenRange
    layer: int
    score: float


class RetrievedChunk(StoredSpan):
    """A span, or adjacent spans that were joined."""

    similarity: float = Field(description="dense cosine, or BM25 relative to the best hit if there is no dense vector")
    dense: float | None = Field(description="cosine; null without a vector")
    bm25: float | None = Field(description="BM25 relative to the best hit; null if no word matches")


class RetrieveResponse(BaseModel):
    """The retrieved chunks, best first, and how they were searched."""

    chunks: list[RetrievedChunk]
    session_total: int
    mode: Literal["hybrid", "dense", "bm25"]
    degraded: str | None = Field(description="why dense scores are missing, else null")


class EmbedRequest(RequestBody):
    """Texts, which are not stored."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHUNKS, fail_fast=True)]


class EmbedResponse(BaseModel):
    """A unit vector for each text, in the same order."""

    model: str = Field(description="embedder; vectors of different ones cannot be compared")
    vectors: list[list[float]]


class DumpResponse(BaseModel):
    """Positions of a session's spans, in the order of writing."""

    session_id: str
    session_total: int
    token_ranges: list[TokenRange]
    layers: list[int]
    scores: list[float]


class SpansResponse(BaseModel):
    """A page of a session's spans, in the order of writing."""

    session_id: str
    session_total: int
    first: int = Field(description="number of spans before these")
    spans: list[StoredSpan]


class SessionInfo(BaseModel):
    session_id: str
    session_total: int
    embedded: int = Field(description="spans with a vector of the current embedder")
    text_bytes: int
    created: float = Field(description="seconds since 1970")
    updated: float
    expires: float | None = Field(description="when a temporary session is deleted unless it is renewed, else null")
    resident: bool = Field(description="whether its index is in memory")


class SessionsResponse(BaseModel):
    """All sessions, the most recently written first."""

    sessions: list[SessionInfo]


class ForgetResponse(BaseModel):
    """No text of the session is in the database, its log or the index any more."""

    session_id: str
    forgotten: int


class RenewResponse(BaseModel):
    """The session lives on."""

    session_id: str
    expires: float | None = Field(description="seconds since 1970; null for a session that is not temporary")


class ResidenceResponse(BaseModel):
    """Whether a session's index is in memory."""

    session_id: str
    resident: bool
    vectors: int


class EmbedderInfo(BaseModel):
    """State of the embedder."""

    name: str
    model: str | None = Field(description="name of its vectors, as `POST /embed` returns it; null without an embedder")
    state: Literal["off", "unavailable", "idle", "starting", "ready"]
    reason: str | None
    pending: int = Field(description="spans without a vector yet")


class HealthResponse(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"
    version: str


class ReadyResponse(BaseModel):
    """The store answers, and how retrieval works."""

    status: Literal["ready"] = "ready"
    retrieval: Literal["hybrid", "bm25"]
    embedder: EmbedderInfo
    index: Literal["faiss", "hnsw", "exact"]
    sessions: int
    spans: int


class ErrorResponse(BaseModel):
    """Every response that is not a success."""

    detail: str
    code: str
    request_id: str


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the error answers of a route for the OpenAPI document."""
    return {status: {"model": ErrorResponse} for status in statuses}
