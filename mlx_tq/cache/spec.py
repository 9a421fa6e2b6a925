"""How one layer stores its tokens: formats, region sizes and seeds, from which every codec follows."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache

import mlx.core as mx

from mlx_tq.codec.formats import Codec, CodecOptions, get_format
from mlx_tq.codec.formats.base import dtype_name, dtype_of
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK, COLD, KVConfig
from mlx_tq.errors import ConfigError

# Up to so many tokens of a pass see each what it would have seen alone, which speculative decoding counts on.
SHORT_PASS = 8
# Normalized keys are packed by the statistics of so many first tokens, ...
LEARNED = 128
# ... and not before this length: queries come after their keys, and those of a short pass are not needed in it.
READY = LEARNED + SHORT_PASS
# Tokens by which the buffer of a cache grows that has packed none.
FULL_STEP = 2 * BLOCK


@dataclass(frozen=True)
class CacheSpec:
    """The storage of one layer.

    Attributes:
        key, value: formats of the body.
        sinks, window: tokens in the model's type at the start and at the end.
        key_options, value_options: of the codecs.
        shared: later layers read this cache with `keys_and_values`, so it holds on to what each step attended to.
        cold: format of the keys of older tokens, or "" where they have no other.
        recent: packed tokens that are not older.
        normalize: keys are normalized (see `codec.normalization`); by means alone where `key_options` has no pairs.
    """

    key: str
    value: str
    sinks: int
    window: int
    key_options: CodecOptions
    value_options: CodecOptions
    shared: bool = False
    cold: str = ""
    recent: int = 0
    normalize: bool = False

    @classmethod
    def for_layer(
        cls,
        config: KVConfig,
        layer: int,
        key: str,
        value: str,
        *,
        shared: bool = False,
        pairs: tuple[tuple[int, int], ...] | None = None,
    ) -> "CacheSpec":
        """The storage of layer number `layer`; its seed is `config.seed + 1000 layer`, and one more for values.

        Args:
            config: of the model.
            layer: its number.
            key: format of its keys, or two as in `KVConfig`.
            value: format of its values.
            shared: see above.
            pairs: the dims that its RoPE turns together, where they are known.
        """
        seed = config.seed + 1000 * layer
        key, _, cold = key.partition(COLD)
        common = {"rotation": config.rotation, "fp32_scales": config.fp32_scales}
        return cls(
            key=key,
            value=value,
            sinks=config.sinks,
            window=max(config.window, 1),  # the newest token stays unpacked: attention needs one such
            key_options=CodecOptions(seed=seed, scale=config.key_scale, pairs=pairs, **common),  # type: ignore[arg-type]
            value_options=CodecOptions(seed=seed + 1, scale=config.value_scale, **common),  # type: ignore[arg-type]
            shared=shared,
            cold=cold,
            recent=config.recent if cold else 0,
            normalize=config.normalize and get_format(key).bits < 16,
        )

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> "CacheSpec":
        """The inverse of `to_dict`."""
        options = {name: CodecOptions(**fields[name]) for name in ("key_options", "value_options")}  # type: ignore[arg-type]
        return cls(**{**fields, **options})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """The storage as plain numbers and strings, for JSON."""
        return asdict(self)

    @property
    def keys(self) -> str:
        """The key formats as `KVConfig` writes them."""
        return f"{self.key}{COLD}{self.cold}" if self.cold else self.key

    def layout(self, key_dim: int, value_dim: int, dtype: mx.Dtype) -> RowLayout:
        """The row layout for a model's head dims and type; one object for each."""
        return _layout(self, key_dim, value_dim, dtype_name(dtype))

    def cold_layout(self, layout: RowLayout, dtype: mx.Dtype) -> RowLayout:
        """The layout of cold rows, beside that of the recent ones.

        Raises:
            ConfigError: a size that the format cannot take, or a format that learns from a cache's first tokens.
        """
        return RowLayout(_cold_codec(self, layout.key.head_dim, dtype_name(dtype)), layout.value)

    def cold_until(self, packed: int) -> int:
        """The position before which keys are cold when tokens before `packed` are packed."""
        return max(self.sinks, packed - self.recent) if self.cold else self.sinks

    def body_nbytes(self, packed: int, layout: RowLayout, dtype: mx.Dtype, capacity: Callable[[int], int] = int) -> int:
        """Bytes of a KV head's rows when tokens before `packed` are packed, in buffers with so much room for them.

        What went cold last is there in both formats, as long as its originals are kept.
        """
        cold = self.cold_until(packed) - self.sinks
        recent = packed - self.cold_until(self.originals_from(packed))
        nbytes = capacity(recent) * layout.nbytes
        return nbytes + capacity(cold) * self.cold_layout(layout, dtype).nbytes if cold else nbytes

    def packed_until(self, length: int) -> int:
        """The logical position before which tokens are packed once `length` have been seen: a multiple of BLOCK."""
        packed = max(self.sinks, (length - self.window) // BLOCK * BLOCK)
        return self.sinks if self.normalize and packed + self.window < READY else packed

    def originals_from(self, packed: int) -> int:
        """The position from which originals are kept for trims when tokens before `packed` are packed."""
        return self.packed_until(packed + self.window - BLOCK)

    def needed_from(self, length: int) -> int:
        """The position from which no token may miss that left, at a new end `length`: blocks come back whole."""
        return self.sinks + max(0, length - self.window - self.sinks) // BLOCK * BLOCK

    def full_capacity(self, packed: int, length: int) -> int:
        """Tokens that sinks and tail have room for when `length` have been seen, and those before `packed` packed.

        Once there are such: the window, the rest of a block, and a block of new tokens. Before that it grows with use.
        """
        if packed > self.sinks:
            return self.sinks + self.window + 2 * BLOCK
        return -(-length // FULL_STEP) * FULL_STEP

    def blocks(self, packed: int) -> int:
        """Blocks of keys that have a mean when tokens before `packed` are packed and none has left."""
        return -(-(packed - self.sinks) // MEAN_TOKENS) if self.normalize else 0

    @property
    def mean_tokens(self) -> int:
        """First tokens of a block of keys that its mean is taken of: those that are there when its first are packed."""
        return min(MEAN_TOKENS, BLOCK - self.sinks % BLOCK + self.window)


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
