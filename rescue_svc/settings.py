"""Settings: a flag wins over a `RESCUE_*` variable, that over `RESCUE_CONFIG`'s TOML file, that over the default."""

import ipaddress
import os
import sys
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

from rescue_svc.errors import SettingsError

CONFIG_VARIABLE = "RESCUE_CONFIG"
# Environment variables that start with RESCUE_ but are not fields of Settings.
NOT_FIELDS = {CONFIG_VARIABLE}


def default_data_dir() -> Path:
    """Return the folder for application data that the platform recommends."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-tq-rescue"
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "mlx-tq-rescue"


def is_loopback(host: str) -> bool:
    """Tell whether `host` is an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Names = Annotated[
    list[str], NoDecode, BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
]


@dataclass(frozen=True)
class Caps:
    """How much the store takes."""

    session_spans: int
    spans: int
    sessions: int


class Settings(BaseSettings):
    """Every setting of the service; each is a flag (`--data-dir`) and a variable (`RESCUE_DATA_DIR`)."""

    model_config = SettingsConfigDict(env_prefix="RESCUE_", env_ignore_empty=True, frozen=True, extra="forbid")

    data_dir: Path = Field(
        default_factory=default_data_dir, description="folder of the database and the index snapshots"
    )
    store: SecretStr | None = Field(
        None, description="postgresql://USER@HOST:PORT/DATABASE for several services at once; else SQLite in data_dir"
    )
    host: str = Field("127.0.0.1", description="address to listen on; any but loopback needs a token")
    port: int = Field(5054, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    token: SecretStr | None = Field(
        None, min_length=16, description="clients must present it; better given as a variable"
    )
    allowed_hosts: Names = Field([], description="further names that a Host header may carry, with commas between")

    embedder: str = Field(
        "auto",
        description="auto, minilm, hashing, none, sentence-transformers:NAME_OR_FOLDER, or an installed one's name",
    )
    model_path: Path | None = Field(None, description="folder of all-MiniLM-L6-v2; else the hub cache or the wheel")
    embed_batch: Count = Field(16, description="texts embedded at once in the background")
    embed_timeout_s: Seconds = Field(30.0, description="an embedder silent for longer is restarted")
    embed_idle_s: Seconds = Field(900.0, description="an embedder idle for longer gives its memory back")
    query_timeout_s: Seconds = Field(0.8, description="a query waits this long for its vector, then BM25 answers alone")

    max_body_bytes: Count = Field(10 * 2**20, description="a larger body is refused before it is parsed")
    max_session_spans: Count = Field(100_000, description="spans a session")
    max_spans: Count = Field(1_000_000, description="spans in all")
    max_sessions: Count = Field(1_000, description="sessions in all")
    max_in_flight: Count = Field(64, description="requests at once; further ones are answered 429")
    max_index_mb: Count = Field(1024, description="memory for indexes; the ones used longest ago leave first")
    index: Literal["auto", "faiss", "numpy", "hnsw", "exact"] = Field(
        "auto", description="faiss or numpy of SQLite, hnsw or exact of PostgreSQL; auto is the first that there is"
    )
    ephemeral: bool = Field(
        False,
        description="end when standard input does and delete what was written; data_dir is then a folder that is empty "
        "or absent, by default a temporary one; for a program with a service of its own",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="of the JSON lines on stderr")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read flags, then the environment, then the TOML file."""
        path = os.environ.get(CONFIG_VARIABLE)
        if path and not Path(path).is_file():
            raise SettingsError(f"{CONFIG_VARIABLE}={path} is not a file; name a TOML file or unset it")
        try:
            file = TomlConfigSettingsSource(settings_cls, toml_file=path or None)
        except (OSError, ValueError) as error:  # not UTF-8, or not TOML
            raise SettingsError(f"{CONFIG_VARIABLE}={path} cannot be read: {error}; name a TOML file") from error
        return init_settings, env_settings, file

    def caps(self) -> Caps:
        """Return the caps of the store."""
        return Caps(self.max_session_spans, self.max_spans, self.max_sessions)

    @model_validator(mode="after")
    def _one_store(self) -> "Settings":
        given = self.store is not None
        if self.store and not self.store.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise ValueError(
                "store is no PostgreSQL URL; give postgresql://USER@HOST:PORT/DATABASE, or none for SQLite"
            )
        if given and self.ephemeral:
            raise ValueError("an ephemeral service deletes what it wrote, and a store is shared; give one of the two")
        if self.index in (("faiss", "numpy") if given else ("hnsw", "exact")):
            ours = "hnsw, exact or auto" if given else "faiss, numpy or auto"
            raise ValueError(
                f"index={self.index} is of the other store; of {'PostgreSQL' if given else 'SQLite'} it is {ours}"
            )
        return self

    @model_validator(mode="after")
    def _needs_token(self) -> "Settings":
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines and no token is set; "
                "set RESCUE_TOKEN (16 characters or more) or listen on 127.0.0.1"
            )
        return self


def load_settings(**flags: Any) -> Settings:
    """Build the settings from flags, environment and file; raise SettingsError with every fault in one message."""
    known = {f"RESCUE_{name.upper()}" for name in Settings.model_fields} | NOT_FIELDS
    unknown = sorted(name for name in os.environ if name.startswith("RESCUE_") and name not in known)
    if unknown:
        raise SettingsError(f"no such setting: {', '.join(unknown)}; `mlx-tq-rescue serve --help` lists all")
    try:
        return Settings(**flags)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors())
        raise SettingsError(faults) from None
