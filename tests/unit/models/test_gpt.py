"""GPT in every combination of its options, against a plain float64 transformer and the closed-form counts."""

import itertools
import math

import jax
import numpy as np
import pytest
from support import random_batch, start_parameters, tiny_gpt
from tolerances import LOSS_RELATIVE

from jmegatron import partition
from jmegatron.models.gpt import Tokens, gpt_logits, gpt_loss, gpt_specs
from jmegatron.models.transformer import LayerParallel
from jmegatron.ops.activations import is_gated
from jmegatron.planner import formulas, hlo

NORMS = ("LayerNorm", "RMSNorm")
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "squared_relu", "quick_gelu", "swiglu", "geglu")
BOOLS = (True, False)
POSITIONS = ("learned_absolute", "rope", "none")
KV_HEADS = (8, 2)
OPTIONS = ("normalization", "activation", "bias", "tied", "position", "kv_heads", "qk_norm")
ALL = list(itertools.product(NORMS, ACTIVATIONS, BOOLS, BOOLS, POSITIONS, KV_HEADS, BOOLS))
ONE = LayerParallel()


def pairwise() -> list[tuple]:
    """Few combinations in which every pair of values of two options occurs at least once."""
    missing = {(i, a[i], j, a[j]) for a in ALL for i, j in itertools.combinations(range(len(OPTIONS)), 2)}
    chosen = []
    while missing:
        pairs = lambda c: {(i, c[i], j, c[j]) for i, j in itertools.combinations(range(len(OPTIONS)), 2)}  # noqa: E731
        best = max(ALL, key=lambda c: len(pairs(c) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


# ---- the plain transformer ----------------------------------------------------------------------------------------
def plain_norm(p, x, kind):
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]
    return y + p["bias"] if kind == "LayerNorm" else y


def plain_activation(name, x):
    erf = np.vectorize(math.erf)
    tanh_gelu = lambda v: 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))  # noqa: E731
    silu = lambda v: v / (1 + np.exp(-v))  # noqa: E731
    if name == "swiglu":
        return silu(x[..., 0, :]) * x[..., 1, :]
    if name == "geglu":
        return tanh_gelu(x[..., 0, :]) * x[..., 1, :]
    return {
        "gelu_tanh": tanh_gelu,
        "gelu_erf": lambda v: 0.5 * v * (1 + erf(v / math.sqrt(2))),
        "squared_relu": lambda v: np.maximum(v, 0) ** 2,
        "quick_gelu": lambda v: v / (1 + np.exp(-1.702 * v)),
    }[name](x)


def plain_rope(x):
    d, half = x.shape[-1], x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def plain_logits(p, tokens, c):
    """[batch, seq] -> [batch, seq, padded vocabulary], one head and one layer after the other."""
    x = p["embedding"]["word"]["embedding"][tokens]
    if c["position"] == "learned_absolute":
        x = x + p["embedding"]["position"]["embedding"][: tokens.shape[1]]
    visible = np.tril(np.ones((tokens.shape[1],) * 2, bool))
    for layer in range(2):
        w = jax.tree.map(lambda a, layer=layer: a[layer], p["layers"])
        y = plain_norm(w["input_norm"], x, c["normalization"])
        a = w["attention"]
        q = np.einsum("bsh,hnd->bsnd", y, a["query"]["kernel"]) + a["query"].get("bias", 0)
        kv = np.einsum("bsh,hnjd->bsnjd", y, a["key_value"]["kernel"]) + a["key_value"].get("bias", 0)
        k, v = kv[..., 0, :], kv[..., 1, :]
        if c["qk_norm"]:
            q, k = (plain_norm(a[f"{n}_norm"], t, c["normalization"]) for n, t in (("query", q), ("key", k)))
        if c["position"] == "rope":
            q, k = plain_rope(q), plain_rope(k)
        out = np.zeros_like(q)
        for head in range(q.shape[2]):
            group = head // (q.shape[2] // k.shape[2])
            scores = np.einsum("bsd,btd->bst", q[:, :, head], k[:, :, group]) / math.sqrt(q.shape[-1])
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[:, :, head] = weights @ v[:, :, group]
        x = x + np.einsum("bsnd,ndh->bsh", out, a["output"]["kernel"]) + a["output"].get("bias", 0)
        y = plain_norm(w["mlp_norm"], x, c["normalization"])
        up = np.tensordot(y, w["mlp"]["up"]["kernel"], 1) + w["mlp"]["up"].get("bias", 0)
        x = x + plain_activation(c["activation"], up) @ w["mlp"]["down"]["kernel"] + w["mlp"]["down"].get("bias", 0)
    x = plain_norm(p["final_norm"], x, c["normalization"])
    return x @ (p["embedding"]["word"]["embedding"].T if c["tied"] else p["output"]["kernel"])


# ---- tests --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values", pairwise(), ids=lambda v: "-".join(map(str, v)))
def test_logits_loss_and_flops_equal_a_plain_transformer_and_the_formula(values):
    options = dict(zip(OPTIONS, values, strict=True))
    settings = tiny_gpt(**options)
    parameters = start_parameters(settings, 3)
    arrays = random_batch(2, 16, 29)
    expected = plain_logits(jax.tree.map(np.float64, parameters), arrays["tokens"], options)

    logits = jax.jit(lambda p, t: gpt_logits(p, t, settings, ONE))(parameters, arrays["tokens"])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=LOSS_RELATIVE * np.abs(expected).max())

    z = expected[..., :29]  # padding takes no part
    largest = z.max(-1)
    losses = np.log(np.exp(z - largest[..., None]).sum(-1)) + largest
    losses -= np.take_along_axis(z, arrays["labels"][..., None], -1)[..., 0]
    tokens = Tokens(arrays["tokens"], arrays["labels"], arrays["loss_mask"], arrays["sample_ids"])
    step = jax.jit(jax.value_and_grad(lambda p, t: gpt_loss(p, t, settings, ONE), has_aux=True))
    (total, per_token), _ = step(parameters, tokens)
    np.testing.assert_allclose(per_token, losses, rtol=LOSS_RELATIVE, atol=LOSS_RELATIVE)
    assert float(total) == pytest.approx((losses * arrays["loss_mask"]).sum(), rel=LOSS_RELATIVE)

    counted = hlo.matmul_flops(hlo.load(step.lower(parameters, tokens).compile()))
    assert counted.total == formulas.executed_flops_per_step(shape_of(options), 2 * 16, scores_again=True)


def shape_of(options):
    return formulas.GPTShape(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=8,
        num_query_groups=options["kv_heads"],
        kv_channels=4,
        vocab_rows=32,
        seq_len=16,
        gated=is_gated(options["activation"]),
        biases=options["bias"],
        norm=options["normalization"].lower(),
        tied=options["tied"],
        num_positions=16 if options["position"] == "learned_absolute" else 0,
        qk_norm=options["qk_norm"],
    )


def test_parameter_count_is_exact_in_every_combination():
    assert len(ALL) == 576
    for values in ALL:
        options = dict(zip(OPTIONS, values, strict=True))
        specs = gpt_specs(tiny_gpt(**options), ONE)
        assert partition.num_parameters(specs) == formulas.parameters(shape_of(options)).total, options


def test_shapes_do_not_depend_on_the_mesh():
    for values in pairwise():
        settings = tiny_gpt(**dict(zip(OPTIONS, values, strict=True)))
        shapes = [
            partition.map_specs(lambda s: s.shape, gpt_specs(settings, LayerParallel("tp", tp, tp > 1)))
            for tp in (1, 2, 4, 8)
        ]
        assert all(s == shapes[0] for s in shapes)
