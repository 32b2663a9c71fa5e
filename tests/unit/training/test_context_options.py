"""What the options of context parallelism, windows and rotary scaling come to, before anything is compiled."""

import shlex

import jax
import pytest

from jmegatron.config import load_config, resolve
from jmegatron.context_parallel.layout import WHOLE_SEQUENCE, ContextParallel
from jmegatron.errors import ConfigError
from jmegatron.mesh import build_mesh
from jmegatron.models.gpt import gpt_specs
from jmegatron.partition import num_parameters
from jmegatron.training.build import attention_backend, formula_shape, gpt_settings, layer_parallel
from jmegatron.training.startup import startup_lines, state_bytes

OPTIONS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-3 --bf16 --mock-data --vocab-size 64 "
    "--padded-vocab-size 64"
)


def config_of(cp: int, *extra: str):
    return resolve(load_config([*OPTIONS, "--context-parallel-size", str(cp), *extra]))


def set_up(dp: int, cp: int, *extra: str):
    """Returns (config, mesh, parameter declarations)."""
    config = config_of(cp, *extra)
    specs = gpt_specs(gpt_settings(config, "cpu"), layer_parallel(config))
    return config, build_mesh(jax.devices()[: dp * cp], dp=dp, cp=cp), specs


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 8), (4, 2)])
def test_the_ranks_of_a_sequence_share_the_optimizer_state_too(dp, cp):
    config, mesh, specs = set_up(dp, cp, "--use-distributed-optimizer")
    # Every dim of the model is divisible by 8: 6 + 12 / d bytes a parameter, d = dp x cp.
    assert sum(state_bytes(config, mesh, specs).values()) == (6 + 12 / (dp * cp)) * num_parameters(specs)


@pytest.mark.parametrize("cp", [1, 4])
def test_every_rank_of_a_sequence_holds_the_whole_state_without_the_distributed_optimizer(cp):
    config, mesh, specs = set_up(2, cp)
    assert sum(state_bytes(config, mesh, specs).values()) == 18 * num_parameters(specs)


def test_flops_of_the_log_do_not_depend_on_the_ranks_of_a_sequence_and_name_a_window():
    lines = {}
    for cp, window in ((1, "-1,0"), (2, "-1,0"), (2, "7,0")):
        log = startup_lines(*set_up(1, cp, f"--window-size={window}"), "off")
        assert f"mesh: pp 1, dp 1, ep 1, cp {cp}, tp 1" in log
        lines[cp, window] = next(line for line in log if line.startswith("FLOPs"))
    assert lines[1, "-1,0"] == lines[2, "-1,0"]
    # h 32, 2 layers, 4 x 32 = 128 tokens: a token sees 16 keys on average, or 8 - 8 x 8 / 64 = 7 in a window of 8.
    layer = 2 * (32 * 3 * 32 + 32 * 32 + 2 * 32 * 128)
    for window, keys in (("-1,0", 16), ("7,0", 7)):
        flops = 3 * (2 * (layer + 4 * keys * 32) + 2 * 32 * 64) * 128
        assert f"FLOPs: {flops:.4g} a step (128 tokens)" in lines[2, window]
    assert "causal attention counted as half" in lines[2, "-1,0"]
    assert "causal attention counted inside its window of 8 tokens" in lines[2, "7,0"]


def test_one_way_of_context_parallelism_holds_for_all_layers():
    assert layer_parallel(config_of(1, "--cp-comm-type", "a2a")).context == WHOLE_SEQUENCE
    for given, expected in (((), "p2p"), (("allgather",), "all_gather"), (("a2a", "a2a"), "a2a")):
        config = config_of(2, *(["--cp-comm-type", *given] if given else []))
        assert layer_parallel(config).context == ContextParallel("cp", 2, expected)
        assert gpt_settings(config, "cpu").place_settings == ()


def test_ways_of_single_layers_reach_the_places_that_run_them():
    types = ["--num-layers", "4", "--cp-comm-type", "p2p", "a2a", "p2p", "a2a"]
    assert gpt_settings(config_of(1, *types), "cpu").place_settings == ()
    for stages, expected in (("1", ["p2p", "a2a"] * 2), ("2", ["p2p", "a2a"])):
        settings = gpt_settings(config_of(2, *types, "--pipeline-model-parallel-size", stages), "cpu")
        assert [place.attention.comm_type for place in settings.place_settings] == expected
        assert {place.attention.num_heads for place in settings.place_settings} == {4}


def test_fused_attention_takes_a_window_unless_keys_come_in_parts():
    fused = ["--attention-dropout", "0", "--attention-backend", "fused", "--window-size", "7,0"]
    assert attention_backend(config_of(1, *fused), "cuda") == "fused"
    assert attention_backend(config_of(2, *fused, "--cp-comm-type", "a2a"), "cuda") == "fused"
    assert attention_backend(config_of(2, *fused, "--window-size=-1,0"), "cuda") == "fused"
    assert attention_backend(config_of(2, *fused, "--attention-backend", "auto"), "cuda") == "unfused"
    for types in (("p2p",), ("all_gather",), ("a2a", "p2p")):
        with pytest.raises(ConfigError, match="fused cannot serve: window_size needs true token indices"):
            attention_backend(config_of(2, *fused, "--cp-comm-type", *types), "cuda")


def test_numbers_of_rotary_scaling_and_window_reach_the_model():
    extra = "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4 --window-size 5,0"
    config = config_of(1, *extra.split())
    settings = gpt_settings(config, "cpu")
    assert settings.rotary_scaling is not None
    scaling = settings.rotary_scaling
    numbers = (scaling.factor, scaling.low_turns, scaling.high_turns, scaling.original_positions)
    assert numbers == (4.0, 1.0, 4.0, 8192)
    assert (settings.layer.attention.window, formula_shape(config).window) == (5, 5)
    plain = gpt_settings(config_of(1), "cpu")
    assert (plain.rotary_scaling, plain.layer.attention.window) == (None, None)
