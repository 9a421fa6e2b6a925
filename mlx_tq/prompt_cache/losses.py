"""What the layers of a model are known to lose: a small file in the user's cache folder, or inside the package."""

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from math import isfinite
from pathlib import Path

from mlx_tq.errors import CacheFormatError
from mlx_tq.files import atomic_write, cache_folder

MEASURED_AT = "tq3"  # is seen in one layer of many, and small enough to grow with the error


@dataclass(frozen=True)
class Losses:
    """Of each compressed layer the KL divergence in nats, mean over tokens, where it alone is stored as MEASURED_AT.

    Attributes:
        keys: where only its keys are.
        values: where only its values are.
        tokens: that were compared.

    Raises:
        CacheFormatError: not as many of the one as of the other, or one that is no loss.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]
    tokens: int

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or not all(isfinite(x) and x >= 0 for x in (*self.keys, *self.values)):
            raise CacheFormatError(f"losses of keys {self.keys} and of values {self.values} are not those of layers.")


def kept_losses(model: str) -> Path:
    """Where those of the model with this fingerprint are kept."""
    return cache_folder() / _name(model)


def known_losses(model: str) -> Losses | None:
    """Those of the model with this fingerprint, or None where they were never measured.

    Raises:
        CacheFormatError: the file is damaged.
    """
    shipped = Path(str(files("mlx_tq") / "assets" / "losses")) / _name(model)
    path = next((path for path in (kept_losses(model), shipped) if path.is_file()), None)
    return None if path is None else _load(path)


def save_losses(path: Path, losses: Losses) -> None:
    """Write them.

    Raises:
        CacheFormatError: the file cannot be written.
    """
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(asdict(losses)) + "\n", encoding="utf-8")
    except OSError as error:
        raise CacheFormatError(
            f"cannot write the losses {path}: {error}. Set XDG_CACHE_HOME to another folder."
        ) from error


def _load(path: Path) -> Losses:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Losses(tuple(map(float, found["keys"])), tuple(map(float, found["values"])), int(found["tokens"]))
    except (OSError, ValueError, TypeError, KeyError, CacheFormatError) as error:
        raise CacheFormatError(f"{path} is damaged ({error!r}). Remove it: it is made again.") from error


def _name(model: str) -> str:
    return f"losses-{model}.json"
