"""Settings: a flag wins over a `RESCUE_*` variable, that over `RESCUE_CONFIG`'s TOML file, that over the default."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from http_limits.process_checks import home_error
from http_limits.request_checks import is_loopback
from http_limits.service_socket import default_data_dir
from rescue_svc.errors import SessionFullError, SettingsError, StoreFullError

CONFIG_VARIABLE = "RESCUE_CONFIG"


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Names = Annotated[
    list[str],
    NoDecode,
    BeforeValidator(lambda value: [name.strip() for name in value.split(",")] if isinstance(value, str) else value),
]


@dataclass(frozen=True)
class Caps:
    session_spans: int
    spans: int
    sessions: int

    def check_new_session(self, stored: int) -> None:
        """Raise StoreFullError if there are as many sessions as may be."""
        if stored >= self.sessions:
            raise StoreFullError(
                f"there are {self.sessions} sessions, the limit; delete some or raise RESCUE_MAX_SESSIONS"
            )

    def check_spans(self, session: str, total: int, stored: int) -> None:
        """Raise SessionFullError or StoreFullError for a session of `total` spans, `stored` in all sessions."""
        if total > self.session_spans:
            raise SessionFullError(
                f"session {session} would have {total} spans, the limit is {self.session_spans}; "
                "delete it, use another, or raise RESCUE_MAX_SESSION_SPANS"
            )
        if stored > self.spans:
            raise StoreFullError(
                f"the store would have {stored} spans, the limit is {self.spans}; "
                "delete sessions or raise RESCUE_MAX_SPANS"
            )


class Settings(BaseSettings):
    """Settings of the service. Each is a variable (`RESCUE_DATA_DIR`), and each except `token` and `store` a flag."""

    model_config = SettingsConfigDict(env_prefix="RESCUE_", env_ignore_empty=True, frozen=True, extra="forbid")

    data_dir: Path = Field(
        default_factory=default_data_dir, description="folder of the database and the index snapshots"
    )
    store: SecretStr | None = Field(
        None, description="postgresql://USER@HOST:PORT/DATABASE for several services; else SQLite in data_dir"
    )
    host: str = Field("127.0.0.1", description="address to listen on; any but loopback requires a token")
    port: int = Field(5054, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    token: SecretStr | None = Field(None, min_length=16, description="token that clients must send")
    allowed_hosts: Names = Field([], description="further host names that clients may use, separated by commas")

    embedder: str = Field(
        "auto",
        description="auto, minilm, hashing, none, sentence-transformers:NAME_OR_FOLDER, or a plug-in",
    )
    model_path: Path | None = Field(
        None, description="folder of all-MiniLM-L6-v2 (default: the hub's cache or the wheel)"
    )
    embed_batch: Count = Field(16, description="batch size of background embedding")
    embed_timeout_s: Seconds = Field(30.0, description="restart the embedder if a batch takes longer")
    embed_idle_s: Seconds = Field(900.0, description="unload the embedder after this idle time")
    query_timeout_s: Seconds = Field(
        0.8, description="maximum wait for the vector of a query; after that, only keyword search is used"
    )

    max_body_bytes: Count = Field(10 * 2**20, description="maximum request size")
    max_session_spans: Count = Field(100_000, description="maximum spans per session")
    max_spans: Count = Field(1_000_000, description="maximum spans in all sessions")
    max_sessions: Count = Field(1_000, description="maximum number of sessions")
    session_lifetime_s: float = Field(
        86_400.0,
        ge=900,  # three renewals of mlx_tq's client
        allow_inf_nan=False,
        description="delete a temporary session after this time, 900 or more, without a write or renewal",
    )
    max_in_flight: Count = Field(64, description="maximum requests in progress; further ones get 429")
    max_index_mb: Count = Field(1024, description="memory for indexes; the least recently used are evicted")
    index: Literal["auto", "hnsw", "exact"] = Field(
        "auto",
        description="hnsw or exact for PostgreSQL; auto is hnsw there, and FAISS for SQLite",
    )
    ephemeral: bool = Field(
        False,
        description="end when standard input ends, and delete all data; data_dir must be empty or absent "
        "(default: a temporary folder)",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="level of the JSON lines on stderr"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = os.environ.get(CONFIG_VARIABLE)
        if path and not Path(path).is_file():
            raise SettingsError(f"{CONFIG_VARIABLE}={path} is not a file; name a TOML file or unset it")
        try:
            file = TomlConfigSettingsSource(settings_cls, toml_file=path or None)
        except (OSError, ValueError) as error:  # not UTF-8, or not TOML
            raise SettingsError(f"{CONFIG_VARIABLE}={path} cannot be read: {error}; name a TOML file") from error
        return init_settings, env_settings, file

    def caps(self) -> Caps:
        return Caps(self.max_session_spans, self.max_spans, self.max_sessions)

    @model_validator(mode="after")
    def _check_combinations(self) -> "Settings":
        if self.store is not None and not self.store.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise ValueError(
                "store is not a PostgreSQL URL; give postgresql://USER@HOST:PORT/DATABASE, or none for SQLite"
            )
        if self.store is not None and self.ephemeral:
            raise ValueError("an ephemeral service deletes its data, and a store is shared; give one of the two")
        if self.store is None and self.index != "auto":
            raise ValueError(f"index={self.index} is for PostgreSQL; SQLite uses FAISS: leave index out")
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines and no token is set; "
                "set RESCUE_TOKEN (16 characters or more) or listen on 127.0.0.1"
            )
        return self


def load_settings(**flags: Any) -> Settings:
    """Build the settings from flags, environment and file; raise SettingsError with every fault in one message."""
    names = {f"RESCUE_{name.upper()}" for name in Settings.model_fields} | {CONFIG_VARIABLE}
    unknown = sorted(name for name in os.environ if name.startswith("RESCUE_") and name not in names)
    if unknown:
        raise SettingsError(f"unknown setting {', '.join(unknown)}; `mlx-tq-rescue serve --help` lists all")
    try:
        return Settings(**flags)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors())
        raise SettingsError(faults) from None
    except RuntimeError as error:  # of the default of data_dir
        raise SettingsError(f"{home_error()} Or set --data-dir.") from error
