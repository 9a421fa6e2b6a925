"""What mlx-lm computes with Metal kernels alone, in plain mlx, for machines without Metal."""

import mlx.core as mx
from mlx_lm.models import bitlinear_layers, muse_spark


def rms(x, eps):
    return x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def qk_norm(qkvg, *, n_heads, n_kv_heads, head_dim, eps, query_scale):
    heads = qkvg.reshape(*qkvg.shape[:-1], -1, head_dim)[..., : n_heads + n_kv_heads, :]
    normed = rms(heads.astype(mx.float32), eps).astype(qkvg.dtype)
    queries = (normed[..., :n_heads, :].astype(mx.float32) * query_scale).astype(qkvg.dtype)
    return [queries, normed[..., n_heads:, :]]


def qk_norm_rope(qkvg, *, rope_base, offset, head_dim, **options):
    def rotate(x):
        by_head = x.swapaxes(1, 2)
        return mx.fast.rope(by_head, head_dim, traditional=True, base=rope_base, scale=1, offset=offset).swapaxes(1, 2)

    return [rotate(x) for x in qk_norm(qkvg, head_dim=head_dim, **options)]


def expert_routing(logits, expert_bias, *, top_k, multiplier, score_eps, route_scale):
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return [chosen, weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale]


def post_expert_norm_combine(experts, weights, *, norm_weight, eps):
    normed = rms(experts.astype(mx.float32) * norm_weight.astype(mx.float32), eps)
    return (normed * weights[..., None]).sum(axis=-2).astype(experts.dtype)


def rms_norm_sigmoid_gate(x, gate, *, eps):
    by_token = rms(x.astype(mx.float32), eps).swapaxes(1, 2).reshape(gate.shape)
    return (by_token * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)


def pre_norm(stream, norm, *, dtype):
    return (rms(stream, norm.eps) * norm.weight).astype(dtype)


def norm_add_norm(branch, stream, *, alpha, beta, post_weight, post_eps, next_norm):
    scaled = branch if post_weight is None else post_weight.astype(branch.dtype) * branch
    normed = rms(scaled.astype(mx.float32), post_eps).astype(branch.dtype)
    new = alpha * stream.astype(mx.float32) + beta * normed.astype(mx.float32)
    return new, None if next_norm is None else pre_norm(new, next_norm, dtype=branch.dtype)


def execute_matmul_kernel(layer, x, packed_weights):
    weights = mx.concatenate([((packed_weights >> (2 * i)) & 3) for i in range(4)]).astype(x.dtype) - 1
    scale = 1 / layer.weight_scale if layer.invert_weight_scales else layer.weight_scale
    return (x @ weights.T) * scale


def install():
    """Let mlx-lm use these functions, if there is no Metal."""
    if mx.metal.is_available():
        return
    bitlinear_layers.BitLinear.execute_matmul_kernel = execute_matmul_kernel
    kernels = (qk_norm, qk_norm_rope, expert_routing, post_expert_norm_combine, rms_norm_sigmoid_gate)
    for function in (*kernels, pre_norm, norm_add_norm):
        setattr(muse_spark, function.__name__, function)
