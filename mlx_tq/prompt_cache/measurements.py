"""Measurements that are made once for a model: the loss of each layer, and query statistics, in files of its name.

They are in the user's cache folder or, for the bundled model and SmolLM2, inside the package.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from math import isfinite
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import mlx.core as mx

from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.files import atomic_write, cache_folder
from mlx_tq.policies.calibration import calibrated_models

_T = TypeVar("_T")
# Their losses are visible in one layer of many, and small enough to grow with the error.
MEASURED_KEY, MEASURED_VALUE = "stcq3", "tcq3"


@dataclass(frozen=True)
class Losses:
    """KL divergence in nats, mean over tokens, if one layer alone is stored as MEASURED_KEY or MEASURED_VALUE."""

    keys: tuple[float, ...]  # by layer, if only its keys are
    values: tuple[float, ...]  # by layer, if only its values are
    tokens: int  # that were compared

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or not all(isfinite(x) and x >= 0 for x in (*self.keys, *self.values)):
            raise CacheFormatError(f"losses of keys {self.keys} and of values {self.values} are not those of layers.")


def losses_path(fingerprint: str) -> Path:
    """Return where the losses of a model are stored."""
    return _path("losses", fingerprint)


def find_losses(fingerprint: str) -> Losses | None:
    """Return the losses of a model, or None if they were never measured; raise CacheFormatError if damaged."""
    return _find("losses", fingerprint, _parse_losses)


def _parse_losses(fields: dict[str, Any]) -> Losses:
    return Losses(tuple(map(float, fields["keys"])), tuple(map(float, fields["values"])), int(fields["tokens"]))


@dataclass(frozen=True)
class HeadScores:
    """How much each KV head needs distant tokens."""

    scores: tuple[tuple[float, ...], ...]  # of the heads of each layer, from 0 (least) to 1
    tokens: int  # of the text

    def __post_init__(self) -> None:
        if not self.scores or not all(0 <= score <= 1 for layer in self.scores for score in layer):
            raise CacheFormatError(f"{self.scores} are not scores of heads.")


def head_scores_path(fingerprint: str) -> Path:
    """Return where the scores of a model's heads are stored."""
    return _path("heads", fingerprint)


def find_head_scores(fingerprint: str) -> HeadScores | None:
    """Return the scores of a model's heads, or None if they were never measured; raise CacheFormatError if damaged."""
    return _find("heads", fingerprint, _parse_head_scores)


def _parse_head_scores(fields: dict[str, Any]) -> HeadScores:
    return HeadScores(tuple(tuple(map(float, layer)) for layer in fields["scores"]), int(fields["tokens"]))


def _path(kind: str, fingerprint: str) -> Path:
    return cache_folder() / f"{kind}-{fingerprint}.json"


def _find(kind: str, fingerprint: str, parse: Callable[[dict[str, Any]], _T]) -> _T | None:
    path = _path(kind, fingerprint)
    if path.is_file():
        try:
            return parse(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, CacheFormatError) as error:
            raise CacheFormatError(f"{path} is damaged ({error!r}). Remove it: it is made again.") from error
    shipped = (json.loads(file.read_text(encoding="utf-8")) for file in sorted(_shipped(kind).glob("*.json")))
    return next((parse(fields) for fields in shipped if fingerprint in fields["models"]), None)


def save_measurements(path: Path, measured: Losses | HeadScores) -> None:
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(asdict(measured)) + "\n", encoding="utf-8")
    except OSError as error:
        raise CacheFormatError(f"cannot write {path}: {error}. Set XDG_CACHE_HOME to another folder.") from error


def calibration_path(fingerprint: str, *, covariance: bool = False) -> Path:
    """Return where the query statistics of a model are stored, with or without the covariance."""
    return cache_folder() / f"queries-{fingerprint}{'-covariance' if covariance else ''}.safetensors"


def find_calibration(fingerprint: str, *, covariance: bool = False) -> Path | None:
    """Return the file of query statistics of a model, or None if it was never calibrated."""
    path = calibration_path(fingerprint, covariance=covariance)
    if path.is_file() or covariance:  # which no file in the package has
        return path if path.is_file() else None
    shipped = sorted(_shipped("queries").glob("*.safetensors"))
    return next((file for file in shipped if fingerprint in calibrated_models(file)), None)


def make_folder(path: Path) -> None:
    """Make the folder of a file; raise ConfigError if no file can be made in it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(
            f"no statistics can be kept in {path.parent}: {error.strerror}. Set XDG_CACHE_HOME to a folder that can be "
            "written, or name a file."
        ) from error


def _shipped(folder: str) -> Path:
    return Path(str(files("mlx_tq") / "assets" / folder))


def log_probabilities(model: Any, ids: list[int], caches: list[Any]) -> mx.array:
    """Run `ids` over the caches; return the log-probabilities of each next token, fp32 [L, V]."""
    return log_softmax(model(mx.array(ids)[None], cache=caches)[0])


def log_softmax(logits: mx.array) -> mx.array:
    """Return the log-probabilities of logits [..., V], in fp32."""
    logits = logits.astype(mx.float32)
    result: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return result


def kl_divergence(reference: mx.array, other: mx.array) -> mx.array:
    """Return the KL divergence of two log-probabilities [..., V], in nats: [...].

    The terms are p log(p / q) + q - p, whose last two parts sum to 0. None is negative, and rounding of the
    log-probabilities enters squared: in float32, it would otherwise add 2e-7 nats.
    """
    p, difference = mx.exp(reference), other - reference
    small = p * (mx.expm1(difference) - difference)
    large = mx.exp(other) - p - p * difference  # p is small, and expm1 may be infinite
    divergence: mx.array = mx.where(difference < 1, small, large).sum(axis=-1)
    return mx.maximum(divergence, 0)
