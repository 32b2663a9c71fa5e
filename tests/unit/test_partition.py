"""Declarations of parameters: what decays, whose gradients are parts, and start values that no mesh changes."""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.megatron_weights import DATA
from jax.sharding import PartitionSpec as P
from layer_support import mesh_of
from support import tiny_gpt

from jmegatron import partition, random
from jmegatron.models.gpt import gpt_specs
from jmegatron.models.transformer import LayerParallel
from jmegatron.partition import ParameterSpec

INIT_STATS = json.loads((DATA / "tables" / "init_stats.json").read_text())
LLAMA = dict(normalization="RMSNorm", activation="swiglu", bias=False, position="rope", tied=False, kv_heads=2)


def specs_of(tp: int = 1, sequence_parallel: bool = False, **changes):
    return gpt_specs(tiny_gpt(**changes), LayerParallel("tp", tp, sequence_parallel))


@functools.cache
def start(tp: int, sequence_parallel: bool = False, **changes):
    """Start values drawn under jit straight into their shards."""
    specs = specs_of(tp, sequence_parallel, **changes)
    mesh = mesh_of(1, tp)
    draw = jax.jit(functools.partial(partition.init_parameters, specs), out_shardings=partition.shardings(specs, mesh))
    return draw(jax.random.key(0))


def named(tree):
    return {partition.path_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


# ---- rules --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [dict(), LLAMA, dict(LLAMA, bias=True, qk_norm=True)])
def test_norms_and_biases_do_not_decay_though_stacked_and_everything_else_does(changes):
    specs = specs_of(**changes)
    mask = named(partition.weight_decay_mask(specs))
    assert mask.keys() == dict(partition.named_specs(specs)).keys()
    for path, decays in mask.items():
        assert decays == (path.split("/")[-1] in ("kernel", "embedding")), path
    stacked_norm = dict(partition.named_specs(specs))["layers/input_norm/scale"]
    assert len(stacked_norm.shape) == 2


def test_without_sequence_parallelism_only_what_ranks_share_of_attention_has_partial_gradients():
    specs = dict(partition.named_specs(specs_of(4, kv_heads=2, qk_norm=True)))
    assert {path for path, s in specs.items() if s.partial_axes} == {
        f"layers/attention/{leaf}"
        for leaf in (
            "key_value/kernel",
            "key_value/bias",
            "query_norm/scale",
            "query_norm/bias",
            "key_norm/scale",
            "key_norm/bias",
        )
    }


def test_with_sequence_parallelism_every_replicated_parameter_has_partial_gradients_over_tp():
    for path, s in partition.named_specs(specs_of(4, True, kv_heads=2, qk_norm=True)):
        replicated = "tp" not in s.spec
        assert s.partial_axes == (("tp",) if replicated else ()), path


def test_stacking_adds_a_leading_dim_and_keeps_the_rest():
    one = {"a": ParameterSpec((3, 4), P(None, "tp"), partition.zeros, ("tp",), weight_decay=False)}
    stacked = partition.stack(one, 5, axis="pp")["a"]
    assert (stacked.shape, stacked.spec) == ((5, 3, 4), P("pp", None, "tp"))
    assert stacked.stacked == ((0, 1, 2, 3, 4),)
    assert (stacked.partial_axes, stacked.weight_decay) == (("tp",), False)


# Layers that have the parameter, by place (-1: none): all of them, or only some, as with --moe-layer-freq.
@pytest.mark.parametrize(
    "places",
    [[[0, 2], [1, 3]], [[0, 1, 2, -1]], [[1, 3], [5, 7]], [[1, 3, 5, -1]], [[3, -1, 5, 9]], [[0, 4], [2, -1]]],
    ids=str,
)
def test_a_checkpoint_holds_the_layers_that_have_a_parameter_in_order_and_gives_them_back(places):
    flat = np.array(places).reshape(-1)
    spec = partition.stack({"a": ParameterSpec((2,), P(None), partition.zeros)}, np.array(places), "pp")["a"]
    value = np.where(flat[:, None] >= 0, flat[:, None] + [0.25, 0.5], 0.0).reshape(spec.shape)
    saved = partition.to_canonical(spec, jnp.asarray(value, jnp.float32))
    wanted = np.array(sorted(flat[flat >= 0]))
    np.testing.assert_array_equal(saved, wanted[:, None] + [0.25, 0.5])
    np.testing.assert_array_equal(partition.from_canonical(spec, saved), value)


def test_a_spec_with_more_entries_than_dims_is_refused():
    with pytest.raises(ValueError, match="more entries than shape"):
        ParameterSpec((3,), P(None, "tp"), partition.zeros)


def test_counts_and_bytes_are_those_of_the_arrays():
    specs = specs_of(4)
    sizes = [leaf.size for leaf in jax.tree.leaves(start(4))]
    assert partition.num_parameters(specs) == sum(sizes)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(start(4)))
    assert partition.local_bytes(specs, dict(mesh_of(1, 4).shape), 4) == held


def test_abstract_arrays_have_the_shapes_and_shardings_of_the_real_ones():
    abstract = partition.abstract(specs_of(4), jnp.float32, mesh_of(1, 4))
    for path, array in named(start(4)).items():
        declared = named(abstract)[path]
        assert (declared.shape, declared.dtype) == (array.shape, array.dtype)
        assert declared.sharding.is_equivalent_to(array.sharding, array.ndim), path


# ---- start values -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (4, True)])
def test_start_values_are_the_same_on_every_mesh(tp, sequence_parallel):
    one, many = named(start(1, **LLAMA)), named(start(tp, sequence_parallel, **LLAMA))
    assert one.keys() == many.keys()
    for path in one:
        np.testing.assert_array_equal(one[path], many[path], err_msg=path)


@pytest.mark.parametrize("changes", [dict(), LLAMA])
def test_start_values_do_not_depend_on_the_padding_of_the_vocabulary(changes):
    short, long = named(start(1, **changes)), named(start(1, padded_vocab=64, **changes))
    for path in short:
        rows = long[path]
        if path in ("embedding/word/embedding", "output/kernel"):
            dim = 0 if "embedding" in path else 1
            np.testing.assert_array_equal(np.take(rows, range(29, 64), dim), 0.0)
            rows = np.take(rows, range(32), dim)
        np.testing.assert_array_equal(short[path], rows, err_msg=path)


def test_a_layers_start_does_not_depend_on_how_many_layers_follow_but_for_the_output_projections():
    few, many = named(start(1)), named(start(1, num_layers=3))
    for path in few:
        if path.startswith("layers/"):
            scale = (2 / 3) ** 0.5 if path in OUTPUT_PROJECTIONS else 1.0
            np.testing.assert_allclose(few[path] * scale, many[path][:2], rtol=1e-6, err_msg=path)


OUTPUT_PROJECTIONS = ("layers/attention/output/kernel", "layers/mlp/down/kernel")


def test_each_layer_is_drawn_from_the_key_of_its_path_and_global_number():
    spec, path = dict(partition.named_specs(specs_of()))["layers/mlp/up/kernel"], "layers/mlp/up/kernel"
    for layer in (0, 1):
        key = jax.random.fold_in(random.parameter_key(jax.random.key(0), path), layer)
        alone = spec.init(key, spec.shape[1:], jnp.float32)
        np.testing.assert_allclose(named(start(1))[path][layer], alone, rtol=1e-6, atol=1e-8)


def test_no_two_layers_parameters_or_column_slices_start_alike():
    for path, array in named(start(4)).items():
        if path.endswith("kernel"):
            shards = [np.asarray(shard.data) for shard in array.addressable_shards]
            assert len(shards) == 4, path
            slices = np.stack(shards).reshape(8, -1)
            assert len(np.unique(slices[:, 0])) == 8, path
            assert np.abs(np.corrcoef(slices) - np.eye(8)).max() < 0.5, path


def test_start_values_have_the_recorded_standard_deviations():
    """Within 2 % for matrices, exactly 0 and 1 for biases and scales; output projections std / sqrt(2 layers)."""
    specs = gpt_specs(
        tiny_gpt(num_layers=8, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=512, padded_vocab=512,
                 max_positions=256, init_std=INIT_STATS["init_method_std"]),
        LayerParallel(),
    )  # fmt: skip
    values = named(jax.jit(functools.partial(partition.init_parameters, specs))(jax.random.key(1)))
    recorded = INIT_STATS["stats"]["gpt_gelu"]
    names = {
        "embedding/word/embedding": "embedding.word_embeddings.weight",
        "embedding/position/embedding": "embedding.position_embeddings.weight",
        "layers/attention/query/kernel": "decoder.layers.0.self_attention.linear_qkv.weight",
        "layers/attention/key_value/kernel": "decoder.layers.0.self_attention.linear_qkv.weight",
        "layers/attention/output/kernel": "decoder.layers.0.self_attention.linear_proj.weight",
        "layers/mlp/up/kernel": "decoder.layers.0.mlp.linear_fc1.weight",
        "layers/mlp/down/kernel": "decoder.layers.0.mlp.linear_fc2.weight",
    }
    for path, array in values.items():
        array = np.asarray(array)
        if path in names:
            assert INIT_STATS["num_layers"] == 8
            assert abs(array.std() / recorded[names[path]]["std"] - 1) < 0.02, path
            assert abs(array.mean()) < 0.01 * array.std() + 5 * array.std() / array.size**0.5, path
        else:
            np.testing.assert_array_equal(array, 1.0 if path.endswith("scale") else 0.0, err_msg=path)


def test_drawing_under_jit_leaves_each_device_its_share_only():
    specs, mesh = specs_of(4, hidden=64, ffn=512), mesh_of(1, 4)
    draw = jax.jit(functools.partial(partition.init_parameters, specs), out_shardings=partition.shardings(specs, mesh))
    compiled = draw.lower(jax.random.key(0)).compile()
    memory = compiled.memory_analysis()
    share = partition.local_bytes(specs, dict(mesh.shape), 4)
    whole = 4 * partition.num_parameters(specs)
    # A pointer for each output on top.
    assert share <= memory.output_size_in_bytes <= share * 1.01 + 1024 < whole / 2
    # Temporaries are the random bits of a rank's own numbers, two words each, never of a whole parameter.
    assert memory.temp_size_in_bytes <= 2 * share < whole
    largest = max(int(np.prod(s.shape)) // (4 if "tp" in s.spec else 1) for _, s in partition.named_specs(specs))
    shapes = re.findall(r"[a-z]+\d+\[([\d,]+)\]", compiled.as_text())
    assert max(math.prod(map(int, dims.split(","))) for dims in shapes) == largest
