"""Records of `mlx-kld` (schema 1), one for each cache, which its `compare` and `plot` rank."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.utils import get_total_parameters

from mlx_tq import __version__
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.results import Record
from mlx_tq.evaluate.standard_error import count_clusters, standard_error
from mlx_tq.evaluate.teacher_forced import TokenScores
from mlx_tq.files import atomic_write
from mlx_tq.models.source import source_of
from mlx_tq.prompt_cache.compressed import plan_caches

SCHEMA = 1


def write_records(
    folder: str,
    model: Any,
    name: str,
    arms: Sequence[Arm],
    scores: Sequence[TokenScores],
    chunks: Sequence[list[int]],
    *,
    settings: Mapping[str, Any],
    seconds: float,
) -> None:
    """Write the record of each arm to FOLDER/MODEL; `scores` begin with those of the reference."""
    place = Path(folder) / _file_name(name)
    shared = _shared_fields(model, name, chunks, settings, seconds)
    reference = scores[0]
    floor = next((float(score.kld.mean()) for arm, score in zip(arms, scores[1:], strict=True) if arm.config.is_off), 0)
    try:
        place.mkdir(parents=True, exist_ok=True)
        for arm, score in zip(arms, scores[1:], strict=True):
            student = _student(model, name, arm, score, len(chunks[0]), settings["step"])
            record = {**shared, "student": student, **_figures(score, reference, floor)}
            same = json.dumps([shared["teacher"], shared["calibration"], arm.config.to_dict()], sort_keys=True)
            digest = hashlib.sha256(same.encode()).hexdigest()[:8]  # so that no other run's record is replaced
            with atomic_write(place / f"{student['path']}.{digest}.json") as temporary:
                temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--records {folder} cannot be written: {error}. Name another folder.") from error


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.+~@-]+", "-", name)


def _shared_fields(
    model: Any, name: str, chunks: Sequence[list[int]], settings: Mapping[str, Any], seconds: float
) -> Record:
    source, length = source_of(model), len(chunks[0])
    tokens = np.array(chunks, dtype=np.int32)
    corpus = Path(settings["text"]).name if settings.get("text_sha256") else "wikitext-2-raw test, excerpt of mlx_tq"
    return {
        "schema_version": SCHEMA,
        "teacher": {"path": name, "revision": None, "precision": None if source is None else source.dtype},
        "tokenizer": {"mode": "shared", "identical": True, "encoding_parity": True, "forced": False, "diffs": []},
        "calibration": {
            "corpus": corpus,
            "num_samples": len(chunks),
            "max_seq_len": length,
            "seed": None,  # the text is read from its beginning
            "top_k": None,  # all of the vocabulary is compared
            "score_window": [settings["step"], length - 1],
            "corpus_tokens_hash": hashlib.sha256(tokens.tobytes()).hexdigest()[:16],
        },
        "elapsed_seconds": seconds,
        "scorer_version": f"mlx_tq {__version__}",
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _student(model: Any, name: str, arm: Arm, score: TokenScores, length: int, step: int) -> Record:
    """Return what is compared; bits and bytes are those of the cache, as all students have the same weights."""
    config, source = arm.config, source_of(model)
    dtype = None if source is None else source.dtype
    if config.is_off:
        bits, quantization = (16.0 if dtype in ("float16", "bfloat16") else 32.0), {"kind": "none", "dtype": dtype}
    else:
        bits = _stored_bits(model, arm, length)
        quantization = {"kind": "kv-cache", "key": config.key, "value": config.value}
    return {
        "path": _file_name(f"{name}-{arm.name}" + ("" if config.is_off else f"-s{config.sinks}-w{config.window}")),
        "format": "mlx",
        "size_bytes": score.nbytes,
        "effective_bpw": bits,
        "n_params": get_total_parameters(model),
        "quantization": quantization,
        "provenance": {
            "name": arm.name if arm.name != OFF.name else "uncompressed cache",
            "kv_key": config.key,
            "kv_value": config.value,
            "sinks": config.sinks,
            "window": config.window,
            "evict": config.to_dict()["evict"],
            "step": step,
            "packed": score.packed,
            "effective_bpw": "stored bits per value of keys and values, not of weights",
            "size_bytes": f"of the cache after {length} tokens",
            "engine": f"mlx_tq {__version__}",
        },
    }


def _stored_bits(model: Any, arm: Arm, length: int) -> float:
    """Return the bits of a packed value, with its scales and means."""
    plan = plan_caches(model, replace(arm.config, evict=None))
    nbytes = sum(region.packed for region in plan.layers_at(length))
    values = sum(
        layer.slot.heads
        * (layer.slot.key_dim + layer.slot.value_dim)
        * (layer.spec.packed_until(length) - layer.spec.sinks)
        for layer in plan.layers
    )
    return 8 * nbytes / values


def _figures(score: TokenScores, reference: TokenScores, floor: float) -> Record:
    kld, clusters = score.kld, score.clusters
    names = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999}
    change = np.exp(-score.nll) - np.exp(-reference.nll)  # of the true next token's probability
    return {
        "kld": {
            "mean": float(kld.mean()),
            "se": standard_error(kld, clusters),
            "se_method": f"clustered, {count_clusters(clusters)} parts of the text",
            "floor_mean": floor,
            **{name: float(value) for name, value in zip(names, np.quantile(kld, list(names.values())), strict=True)},
            "max": float(kld.max()),
        },
        "delta_p": {
            "mean": float(change.mean()),
            "se": standard_error(change, clusters),
            "rms": float(np.sqrt(np.square(change).mean())),
        },
        "agreement": {"top1": float(score.agrees.mean()), "top5": float(score.in_top.mean())},
        "tokens_scored": len(kld),
    }
