"""A model with latent attention (MLA) in torch, under the names of DeepSeek V3 (`mlx_lm.models.deepseek_v3`, dense).

B batch, T tokens, H heads, R latent rank, P rotated dims.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models.hybrid import MLP, Decoder, RMSNorm


@dataclass(frozen=True)
class LatentShape:
    """Sizes of the model, under the names of DeepSeek V3's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    intermediate_size: int = 512
    num_attention_heads: int = 4
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to neighboring dims."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are made from one latent of a token, and a rotated part of keys."""

    def __init__(self, shape: LatentShape) -> None:
        super().__init__()
        self.shape = shape
        heads, nope, rotated = shape.num_attention_heads, shape.qk_nope_head_dim, shape.qk_rope_head_dim
        self.q_proj = nn.Linear(shape.hidden_size, heads * (nope + rotated), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden_size, shape.kv_lora_rank + rotated, bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, 1e-6)
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, heads * (nope + shape.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * shape.v_head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        H, nope, P = self.shape.num_attention_heads, self.shape.qk_nope_head_dim, self.shape.qk_rope_head_dim
        q_nope, q_rotated = self.q_proj(x).view(B, T, H, nope + P).transpose(1, 2).split([nope, P], -1)
        latent, k_rotated = self.kv_a_proj_with_mqa(x).split([self.shape.kv_lora_rank, P], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, T, H, -1).transpose(1, 2)
        k_nope, v = expanded.split([nope, self.shape.v_head_dim], -1)
        q = torch.cat([q_nope, rotate_pairs(q_rotated, cos, sin)], -1)
        k_rotated = rotate_pairs(k_rotated[:, None], cos, sin)
        k = torch.cat([k_nope, k_rotated.expand(-1, H, -1, -1)], -1)
        # Written out: torch's flash attention has a slow backward pass on a CPU.
        scores = (q @ k.transpose(-1, -2)).float() * (nope + P) ** -0.5
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -1e30)
        out = (torch.softmax(scores, -1).to(v.dtype) @ v).transpose(1, 2)
        return self.o_proj(out.reshape(B, T, -1))


class LatentLayer(nn.Module):
    def __init__(self, shape: LatentShape) -> None:
        super().__init__()
        self.self_attn = LatentAttention(shape)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Latent(Decoder):
    def __init__(self, shape: LatentShape) -> None:
        super().__init__(shape, (LatentLayer(shape) for _ in range(shape.num_hidden_layers)), shape.qk_rope_head_dim)
