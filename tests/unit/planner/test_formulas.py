"""Textbook figures against published sizes, hand-made sums and the reference's own numbers."""

import dataclasses

import pytest

from jmegatron.planner.cards import CARDS
from jmegatron.planner.formulas import (
    GPTShape,
    attention_flops_per_token,
    backward_flops_per_token,
    executed_flops_per_step,
    forward_flops_per_token,
    matmul_parameters,
    mfu,
    model_flops_per_step,
    parameters,
)

GPT2 = GPTShape(12, 768, 3072, 12, 12, 64, vocab_rows=50257, seq_len=1024, num_positions=1024)
LLAMA = {"gated": True, "biases": False, "norm": "rmsnorm", "tied": False}
LLAMA3_8B = GPTShape(32, 4096, 14336, 32, 8, 128, vocab_rows=128256, seq_len=8192, **LLAMA)
FIXTURE_GPT = GPTShape(4, 64, 256, 4, 4, 16, vocab_rows=128, seq_len=32, num_positions=32)
FIXTURE_LLAMA = GPTShape(4, 64, 160, 4, 2, 16, vocab_rows=128, seq_len=32, **LLAMA)
# parity.md 4.21: 70B for 512 GPUs, once with a 4h GELU MLP, once Llama-style
SEED_GELU = GPTShape(80, 8192, 4 * 8192, 64, 64, 128, vocab_rows=128_000, seq_len=4096, tied=False, num_positions=4096)
SEED_LLAMA = GPTShape(80, 8192, 28672, 64, 8, 128, vocab_rows=128_000, seq_len=4096, **LLAMA)
SEED_TOKENS = 1024 * 4096


@pytest.mark.parametrize(
    ("shape", "total"),
    [
        (GPT2, 124_439_808),
        (LLAMA3_8B, 8_030_261_248),
        (FIXTURE_GPT, 210_304),
        (FIXTURE_LLAMA, 188_992),
    ],
)
def test_parameter_counts_equal_the_published_ones(shape, total):
    assert parameters(shape).total == total


def test_parameters_by_part_of_gpt2():
    part = parameters(GPT2)
    assert part.word_embedding == 50257 * 768
    assert part.position_embedding == 1024 * 768
    assert part.attention == 12 * (768 * 2304 + 2304 + 768 * 768 + 768)
    assert part.mlp == 12 * (768 * 3072 + 3072 + 3072 * 768 + 768)
    assert part.norms == (2 * 12 + 1) * 2 * 768
    assert part.output_layer == 0


def test_qk_norm_adds_two_head_wide_norms_a_layer():
    with_norm = dataclasses.replace(FIXTURE_LLAMA, qk_norm=True)
    assert parameters(with_norm).total - parameters(FIXTURE_LLAMA).total == 4 * 2 * 16
    with_norm = dataclasses.replace(FIXTURE_GPT, qk_norm=True)
    assert parameters(with_norm).total - parameters(FIXTURE_GPT).total == 4 * 2 * 2 * 16


def test_matmul_weights_leave_out_embeddings_biases_and_norms():
    assert matmul_parameters(GPT2) == 12 * 12 * 768**2 + 50257 * 768


def test_forward_flops_are_two_a_weight_and_four_s_h_a_layer():
    assert attention_flops_per_token(GPT2) == 12 * 4 * 1024 * 768
    assert attention_flops_per_token(GPT2, causal_skip=True) == 12 * 2 * 1024 * 768
    assert forward_flops_per_token(GPT2) == 2 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 4 * 1024 * 768
    assert backward_flops_per_token(GPT2) == 2 * forward_flops_per_token(GPT2)


def test_a_window_leaves_the_band_below_the_diagonal():
    # Row i of 1024 has min(i + 1, 128) keys; the formula counts a triangle of s rows as s^2 / 2, half a key a row less.
    window = dataclasses.replace(GPT2, window=127)
    keys = sum(min(row + 1, 128) for row in range(1024)) / 1024
    assert attention_flops_per_token(window, causal_skip=True) / (12 * 4 * 768) == pytest.approx(keys, abs=0.5)
    assert attention_flops_per_token(window, causal_skip=True) == 12 * 4 * 768 * (128 - 128**2 / 2048)
    assert attention_flops_per_token(window) == attention_flops_per_token(GPT2)
    whole = dataclasses.replace(GPT2, window=1023)
    assert attention_flops_per_token(whole, causal_skip=True) == attention_flops_per_token(GPT2, causal_skip=True)


def test_step_flops_agree_with_6nd_plus_12_l_h_s():
    tokens = 8 * 1024
    expected = 6 * matmul_parameters(GPT2) * tokens + 12 * 12 * 768 * 1024 * tokens
    assert model_flops_per_step(GPT2, tokens) == expected


@pytest.mark.parametrize(
    ("shape", "billions", "flops", "seconds"), [(SEED_GELU, 66.5, 1.715e18, 8.38), (SEED_LLAMA, 70.5, 1.817e18, 8.87)]
)
def test_the_references_figures_for_70b_are_met(shape, billions, flops, seconds):
    assert parameters(shape).total / 1e9 == pytest.approx(billions, abs=0.1)
    ours = model_flops_per_step(shape, SEED_TOKENS, causal_skip=True)
    assert ours == pytest.approx(flops, rel=5e-4)
    assert ours / (512 * 400e12) == pytest.approx(seconds, abs=0.005)


def test_the_references_ratio_to_6nd_is_met():
    matrices = matmul_parameters(SEED_GELU) + SEED_GELU.vocab_rows * SEED_GELU.hidden_size
    ratio = model_flops_per_step(SEED_GELU, SEED_TOKENS, causal_skip=True) / (6 * matrices * SEED_TOKENS)
    assert ratio == pytest.approx(1.0246, abs=5e-5)


def test_full_recompute_adds_a_forward_of_the_layers_and_blocks_of_attention_their_scores():
    none, selective, full = (
        executed_flops_per_step(GPT2, 10, recompute=recompute) for recompute in ("none", "selective", "full")
    )
    assert none == selective == model_flops_per_step(GPT2, 10)
    assert full - none == 10 * (forward_flops_per_token(GPT2) - 2 * 50257 * 768)
    again = executed_flops_per_step(GPT2, 10, recompute="full", scores_again=True)
    assert again - full == 10 * 2 * 1024 * 768 * 12
    with pytest.raises(ValueError, match="recompute 'some'"):
        executed_flops_per_step(GPT2, 10, recompute="some")


def test_mfu_is_the_share_of_the_peak():
    assert mfu(989e12 * 8 * 2, step_seconds=4.0, num_devices=8, peak_flops=CARDS["h100"].peak_bf16_flops) == 0.5
    with pytest.raises(ValueError, match=r"step_seconds 0\.0"):
        mfu(1.0, 0.0, 1, 1.0)


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="batchnorm"):
        dataclasses.replace(GPT2, norm="batchnorm")
