"""The hybrid model in torch: gated delta net layers, every fourth full attention with partial RoPE.

The shape of Qwen3-Next as mlx-lm runs it (`mlx_lm.models.qwen3_next`, dense, tied embeddings), under the same names, so
that a checkpoint is a model folder's weights as it is. B batch, T tokens, H heads, D head dim, C tokens of a chunk.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, under the names of Qwen3-Next's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    full_attention_interval: int = 4
    intermediate_size: int = 512
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    partial_rotary_factor: float = 0.25
    rope_theta: float = 100_000.0
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the first dims of `x`, as many as the angles have."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    """Causal attention with grouped heads, qk-norm, partial RoPE and a sigmoid gate on its output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        H, K, D = self.shape.num_attention_heads, self.shape.num_key_value_heads, self.shape.head_dim
        q, gate = self.q_proj(x).view(B, T, H, 2 * D).chunk(2, -1)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(B, T, K, D)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(B, T, K, D).transpose(1, 2)
        k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
        # Written out: torch's flash attention has a slow backward pass on a CPU.
        scores = (q @ k.transpose(-1, -2)).float() * D**-0.5
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -1e30)
        out = (torch.softmax(scores, -1).to(v.dtype) @ v).transpose(1, 2)
        return self.o_proj((out * torch.sigmoid(gate)).reshape(B, T, H * D))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = 32) -> Tensor:
    """The gated delta rule, chunk by chunk (Yang et al., arXiv 2412.06464, section 3.3).

    State S of [D, Dv], per head: `S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t k_t S_{t-1}))`, output `q_t S_t`.

    Args:
        q: queries [B, H, T, D], scaled.
        k: keys [B, H, T, D], of length one.
        v: values [B, H, T, Dv].
        log_decay: log a, [B, H, T].
        beta: how much of a value is written, [B, H, T].
        chunk: tokens handled at a time; divides T.
    """
    B, H, T, _ = q.shape
    N = T // chunk
    q, k, v, beta = (x.float().reshape(B, H, N, chunk, -1) for x in (q, k, v, beta[..., None]))
    total = log_decay.float().reshape(B, H, N, chunk).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    # decay[i, j]: what is left at i of what was written at j.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -1e30).exp()
    written = beta * k
    strict = (written @ k.transpose(-1, -2) * decay).tril(-1)
    # Each token writes what its key does not hold yet: a triangular system over the chunk.
    reached = total.exp()[..., None]
    sides = torch.cat([beta * v, written * reached], -1)
    solved = torch.linalg.solve_triangular(strict + torch.eye(chunk), sides, upper=False, unitriangular=True)
    new, old = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = q @ k.transpose(-1, -2) * decay
    carry = q * reached
    left = k * (total[..., -1:] - total).exp()[..., None]
    state = q.new_zeros(B, H, k.shape[-1], v.shape[-1])
    outs = []
    for n in range(N):
        values = new[:, :, n] - old[:, :, n] @ state
        outs.append(carry[:, :, n] @ state + inside[:, :, n] @ values)
        state = state * total[:, :, n, -1, None, None].exp() + left[:, :, n].transpose(-1, -2) @ values
    return torch.stack(outs, 2).reshape(B, H, T, -1)


class GatedNorm(nn.Module):
    """RMSNorm times silu of a gate, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps) * F.silu(gate.float())


class GatedDeltaNet(nn.Module):
    """Linear attention: a causal convolution of q, k and v, then the gated delta rule."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.key_dim, self.value_dim = (
            shape.linear_num_key_heads,
            shape.linear_key_head_dim,
            shape.linear_value_head_dim,
        )
        if shape.linear_num_value_heads != self.heads:
            raise ValueError("this model has as many value heads as key heads")
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        self.in_proj_qkvz = nn.Linear(shape.hidden_size, 2 * keys + 2 * values, bias=False)
        self.in_proj_ba = nn.Linear(shape.hidden_size, 2 * self.heads, bias=False)
        self.conv1d = nn.Conv1d(
            2 * keys + values, 2 * keys + values, shape.linear_conv_kernel_dim, groups=2 * keys + values, bias=False
        )
        # Half-lives of one to a few hundred tokens to begin with.
        self.dt_bias = nn.Parameter(torch.linspace(-5.0, 0.0, self.heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.norm = GatedNorm(self.value_dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(values, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        H, D, Dv = self.heads, self.key_dim, self.value_dim
        q, k, v, z = self.in_proj_qkvz(x).view(B, T, H, -1).split([D, D, Dv, Dv], -1)
        b, a = self.in_proj_ba(x).view(B, T, H, 2).float().unbind(-1)
        mixed = torch.cat([q.reshape(B, T, -1), k.reshape(B, T, -1), v.reshape(B, T, -1)], -1)
        taps = self.conv1d.weight[:, 0].to(mixed.dtype)  # [channels, kernel]
        size = taps.shape[-1]
        padded = F.pad(mixed, (0, 0, size - 1, 0))
        mixed = F.silu(sum(padded[:, i : i + T] * taps[:, i] for i in range(size)))
        q, k, v = (part.view(B, T, H, -1).transpose(1, 2).float() for part in mixed.split([H * D, H * D, H * Dv], -1))
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * D**-0.5
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        log_decay = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        out = delta_rule(q, k, v, log_decay.transpose(1, 2), torch.sigmoid(b).transpose(1, 2))
        out = self.norm(out.transpose(1, 2), z)
        return self.out_proj(out.reshape(B, T, -1).to(x.dtype))


class MLP(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.is_linear = (index + 1) % shape.full_attention_interval != 0
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(shape)
        else:
            self.self_attn = Attention(shape)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        x = x + (self.linear_attn(h) if self.is_linear else self.self_attn(h, cos, sin))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Layers between a tied embedding and head. `rotated` is the number of dims that RoPE rotates."""

    def __init__(self, shape: Any, layers: Iterable[nn.Module], rotated: int) -> None:
        super().__init__()
        self.shape, self._rotated = shape, rotated
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * shape.num_hidden_layers) if last else 1))

    def forward(self, ids: Tensor, wanted: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return logits of `ids` [B, T]; with `wanted`, only of these flat positions."""
        frequencies = self.shape.rope_theta ** (-torch.arange(0, self._rotated, 2).float() / self._rotated)
        angles = torch.outer(torch.arange(ids.shape[1]).float(), frequencies)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        x = self.embed_tokens(ids).to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        if wanted is not None:
            x = x.reshape(-1, x.shape[-1])[wanted]
        return F.linear(x, self.embed_tokens.weight.to(x.dtype))


class Hybrid(Decoder):
    """T must be a multiple of 32."""

    def __init__(self, shape: Shape) -> None:
        layers = (Layer(shape, i) for i in range(shape.num_hidden_layers))
        super().__init__(shape, layers, int(shape.head_dim * shape.partial_rotary_factor))
