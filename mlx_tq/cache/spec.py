"""How one layer stores its tokens: formats, region sizes and seeds, from which every codec follows."""

from dataclasses import asdict, dataclass
from functools import lru_cache

import mlx.core as mx

from mlx_tq.cache.region_map import RegionSizes
from mlx_tq.codec.formats import Codec, CodecOptions, get_format
from mlx_tq.codec.formats.base import dtype_name, dtype_of
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import COLD, KVConfig
from mlx_tq.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CacheSpec(RegionSizes):
    """The storage of one layer."""

    key: str  # format of packed keys
    value: str
    key_options: CodecOptions  # without RoPE pairs, normalized keys are centered but not rescaled
    value_options: CodecOptions
    shared: bool = False  # whether later layers read this cache, so that it keeps the view of each pass
    cold: str = ""  # format of the keys of older tokens, or "" if they have the same
    recent: int = 0  # number of packed tokens whose keys are not cold
    # With a window, retrieval heads keep all tokens, and streaming heads evict. Of the tokens that are not packed
    # before a long pass, the latter see the first `head_sinks` and the last `head_window`.
    retrieval_heads: tuple[int, ...] = ()  # ascending
    head_sinks: int = 0
    head_window: int = 0
    latent: bool = False  # keys are the latents of MLA, and values the part of keys that RoPE rotates
    indexed: bool = False  # an indexer numbers the tokens of each pass

    @classmethod
    def for_layer(
        cls,
        config: KVConfig,
        layer: int,
        key: str,
        value: str,
        *,
        shared: bool = False,
        latent: bool = False,
        indexed: bool = False,
        pairs: tuple[tuple[int, int], ...] | None = None,
    ) -> "CacheSpec":
        """Return the storage of layer number `layer`; its seed is `config.seed + 1000 layer`, one more for values.

        `key` is one format, or two as in `KVConfig`. Latents are not normalized: queries read them as keys and as
        values. `pairs` are the dims that RoPE rotates together, if known.
        """
        seed = config.seed + 1000 * layer
        key, _, cold = key.partition(COLD)
        common = {"rotation": config.rotation, "fp32_scales": config.fp32_scales}
        return cls(
            key=key,
            value=value,
            sinks=config.sinks,
            window=max(config.window, 1),
            key_options=CodecOptions(seed=seed, scale=config.key_scale, pairs=pairs, **common),  # type: ignore[arg-type]
            value_options=CodecOptions(seed=seed + 1, scale=config.value_scale, **common),  # type: ignore[arg-type]
            shared=shared,
            cold=cold,
            recent=config.recent if cold else 0,
            normalize=config.normalize and get_format(key).bits < 16 and not latent,
            latent=latent,
            indexed=indexed,
        )

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> "CacheSpec":
        options = {name: CodecOptions(**fields[name]) for name in ("key_options", "value_options")}  # type: ignore[arg-type]
        return cls(**{**fields, **options, "retrieval_heads": tuple(fields["retrieval_heads"])})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self)

    @property
    def keys(self) -> str:
        """The key formats as `KVConfig` writes them."""
        return f"{self.key}{COLD}{self.cold}" if self.cold else self.key

    def layout(self, key_dim: int, value_dim: int, dtype: mx.Dtype) -> RowLayout:
        """Return the row layout for a model's head dims and dtype; one object for each."""
        return _layout(self, key_dim, value_dim, dtype_name(dtype))

    def cold_layout(self, layout: RowLayout, dtype: mx.Dtype) -> RowLayout:
        """Return the layout of cold rows, next to that of recent ones; raise ConfigError if keys cannot have both."""
        return RowLayout(_cold_codec(self, layout.key.head_dim, dtype_name(dtype)), layout.value)

    def cold_until(self, packed: int) -> int:
        """Return the position before which keys are cold when tokens before `packed` are packed."""
        return max(self.sinks, packed - self.recent) if self.cold else self.sinks

    def recent_from(self, packed: int) -> int:
        """Return the position from which keys have recent rows when tokens before `packed` are packed."""
        return self.cold_until(self.originals_from(packed))


@lru_cache(maxsize=4096)
def _layout(spec: CacheSpec, key_dim: int, value_dim: int, dtype: str) -> RowLayout:
    key = get_format(spec.key).codec(key_dim, spec.key_options, dtype_of(dtype))
    value = get_format(spec.value).codec(value_dim, spec.value_options, dtype_of(dtype))
    return RowLayout(key, value)


@lru_cache(maxsize=4096)
def _cold_codec(spec: CacheSpec, key_dim: int, dtype: str) -> Codec:
    codec = get_format(spec.cold).codec(key_dim, spec.key_options, dtype_of(dtype))
    if codec.learned_bytes:
        raise ConfigError(f"{spec.cold} learns from keys as they first came; cold keys are decoded ones. Use tq3.")
    return codec
