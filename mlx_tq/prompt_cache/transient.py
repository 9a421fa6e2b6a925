"""Estimates from above the bytes that one forward pass takes temporarily, without weights and caches.

Each layer frees its own before the next one begins. The numbers of copies are those of a CPU, where they were measured.
"""

from collections.abc import Sequence

from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.integration.probe import SlotFacts
from mlx_tq.kernels import backend
from mlx_tq.kernels.mlx_attention import AttentionShape, bounds, scores_nbytes
from mlx_tq.prompt_cache.layer_bytes import native_cache_bytes

# Copies of queries, keys and values from their projection to the output: without and with norm, RoPE and rotation.
_PROJECTED_COPIES = 4
# Copies of a layer's keys and values while mlx-lm's own cache grows.
_GROWN_COPIES = 2
# Copies of decoded keys and values, and fp32 copies of the tokens that are encoded. The reference implementations make
# one per operation, and mlx begins up to ten operations ahead.
_DECODED_COPIES, _ENCODED_COPIES = 1, 2
_REFERENCE_DECODED_COPIES, _REFERENCE_ENCODED_COPIES = 3, 4
_SELECTION_COPIES = 2
_FP32_BYTES = 4
# Copies of the keys and values of all heads that a model of MLA makes from latents, and of the scores of rotated parts.
_EXPANDED_COPIES, _ROTATED_SCORES_COPIES = 3, 2


def attention_nbytes(slot: SlotFacts, tokens: int, step: int, rows: int = 1, *, compressed: bool) -> int:
    """Return the bytes of attention when the last `step` of `tokens` tokens attend to all of them.

    The `rows` of a batch attend one after another.
    """
    queries, dtype, head_dims = min(step, tokens), dtype_of(slot.dtype), slot.key_dim + slot.value_dim
    if not slot.query_heads or not queries:
        return 0
    dims, causal = (slot.key_dim, slot.value_dim, dtype), queries > 1
    in_kernel = compressed and backend.current() == "cpu"
    shape = AttentionShape(1, slot.query_heads, slot.heads, queries, tokens, *dims, causal)
    projected = rows * queries * (slot.query_heads + slot.heads) * head_dims * dtype.size
    return (
        (0 if in_kernel else scores_nbytes(shape)) + _PROJECTED_COPIES * projected + expanded_nbytes(slot, tokens, step)
    )


def expanded_nbytes(slot: SlotFacts, tokens: int, step: int) -> int:
    """Return the bytes of what an MLA model computes from the latents of `tokens` tokens in a pass of several."""
    queries = min(step, tokens)
    if not slot.latent or queries == 1:
        return 0
    numbers = _EXPANDED_COPIES * slot.expanded + _ROTATED_SCORES_COPIES * slot.query_heads * queries
    return tokens * numbers * dtype_of(slot.dtype).size


def selection_nbytes(slot: SlotFacts, tokens: int, step: int) -> int:
    """Return the bytes that an indexer takes to select tokens: scores per KV head, and a mask per query head."""
    scores = _SELECTION_COPIES * slot.heads * _FP32_BYTES
    return (slot.query_heads + scores) * min(step, tokens) * tokens


def growth_nbytes(slot: SlotFacts, tokens: int) -> int:
    """Return the bytes of copies while mlx-lm's own cache of a layer grows to `tokens` tokens."""
    return _GROWN_COPIES * native_cache_bytes(slot, tokens)


def compression_nbytes(slot: SlotFacts, tokens: int, step: int, rows: int = 1) -> int:
    """Return the bytes of a layer's decoded keys and values, and of those of `step` tokens while they are encoded.

    The `rows` of a batch are decoded one after another.
    """
    head_dims, size = slot.key_dim + slot.value_dim, dtype_of(slot.dtype).size
    decoded = 0 if backend.current() == "cpu" else slot.heads * tokens * head_dims * size
    if decoded > bounds().decoded:
        decoded //= slot.heads
    encoded = rows * slot.heads * min(step, tokens) * head_dims * _FP32_BYTES
    if backend.current() == "reference":
        return _REFERENCE_DECODED_COPIES * decoded + _REFERENCE_ENCODED_COPIES * encoded
    return _DECODED_COPIES * decoded + _ENCODED_COPIES * encoded


def activation_nbytes(slots: Sequence[SlotFacts], activations: int, tokens: int) -> int:
    """Return the bytes of hidden states and of an MLP's numbers while `tokens` tokens pass through a layer."""
    return tokens * activations * dtype_of(slots[0].dtype).size
