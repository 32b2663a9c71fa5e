"""Recorded checkpoints of Megatron-Core become ours bit-equal and go back; what does not fit is named, not written."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.megatron_weights import recorded, reference_settings, unpack_checkpoints
from golden.test_moe_reference import moe_settings
from safetensors.numpy import load_file

from jmegatron import partition
from jmegatron.checkpoint.reader import find
from jmegatron.checkpoint.streaming import StreamingReader, StreamingWriter
from jmegatron.errors import UsageError
from jmegatron.interop import megatron
from jmegatron.interop.megatron import (
    arguments,
    export_checkpoint,
    import_checkpoint,
    optimizer_common,
    options,
    pieces,
    plan_import,
    shapes,
    stored,
)
from jmegatron.interop.pieces import Slot, all_ours, all_theirs, names, slots
from jmegatron.interop.torch_dist import TorchDistReader
from jmegatron.models.gpt import GPTSettings, gpt_specs
from jmegatron.models.transformer import LayerParallel
from jmegatron.ops.rotary import RotaryScaling
from jmegatron.optimizer.optimizers import OptimizerSettings, build_optimizer
from jmegatron.optimizer.schedules import LearningRateSchedule, WeightDecaySchedule
from jmegatron.training.state import TrainState, named_arrays

CHECKPOINTS = {
    "gpt_gelu_tp1": "gpt_gelu",
    "gpt_gelu_tp2": "gpt_gelu",
    "gpt_gelu_pp2": "gpt_gelu",
    "llama_like_tp1": "llama_like",
}
TINY = "gpt_tiny_distopt_dp2_fully_reshardable"
FLAT = "gpt_tiny_distopt_dp2_dp_reshardable"
SCHEDULE = LearningRateSchedule("cosine", peak=2e-3, minimum=2e-4, warmup=32.0, decay=160.0, samples_per_update=8)
OPTIMIZER = OptimizerSettings(beta1=0.9, beta2=0.95, weight_decay=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    for model in ("gpt_gelu", "llama_like", "moe", "gpt_tiny"):
        unpack_checkpoints(model, path)
    return path


def tiny_settings() -> GPTSettings:
    """2 layers of width 32 with 2 heads, 64 tokens."""
    s = reference_settings("gpt_gelu", ffn_hidden_size=128, num_kv_heads=2)
    attention = dataclasses.replace(s.layer.attention, hidden_size=32, num_heads=2)
    layer = dataclasses.replace(s.layer, attention=attention, mlp=dataclasses.replace(s.layer.mlp, hidden_size=32))
    return dataclasses.replace(s, num_layers=2, layer=layer, vocab_size=64, padded_vocab_size=64)


def changed(settings: GPTSettings, *, attention: Any = (), mlp: Any = (), layer: Any = (), **model: Any) -> GPTSettings:
    inner = dataclasses.replace(
        settings.layer,
        attention=dataclasses.replace(settings.layer.attention, **dict(attention)),
        mlp=dataclasses.replace(settings.layer.mlp, **dict(mlp)),
        **dict(layer),
    )
    return dataclasses.replace(settings, layer=inner, **model)


def meta(step: int) -> dict[str, Any]:
    position = {"updates": step, "samples": 8 * step}
    return {"step": step, "consumed_samples": 8 * step, "schedule_position": position, "config": "", "versions": {}}


def imported(path: Path, settings: GPTSettings, target: Path, **options: Any) -> StreamingReader:
    """Imports a checkpoint and reads ours; the step is checked as a run checks it."""
    reader = TorchDistReader(path)
    plan = plan_import(reader, settings, **options)
    with StreamingWriter(str(target), plan.iteration, plan.layout) as writer:
        import_checkpoint(reader, plan, writer)
        writer.commit(meta(plan.iteration))
    checkpoint, passed = find(str(target))
    assert checkpoint is not None
    assert passed == []
    return StreamingReader(checkpoint)


def by_layer(path: Path) -> dict[str, np.ndarray]:
    """What the ranks of a recording held, by the names of `state_dict`."""
    return {k: v for file in sorted(path.glob("plain_rank*.safetensors")) for k, v in load_file(file).items()}


def below(reader: StreamingReader, prefix: str) -> dict[str, np.ndarray]:
    return {n.removeprefix(prefix): reader.read(n) for n in reader.arrays if n.startswith(prefix)}


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


# ---- names and layouts --------------------------------------------------------------------------------------------
def test_rows_of_the_joint_projection_are_queries_key_and_value_of_each_group() -> None:
    """Two groups of two heads of width 16; each row of theirs holds its own number."""
    settings = reference_settings("llama_like", use_qkv_bias=True)
    rows = np.arange(8 * 16, dtype=np.float32)
    name = "decoder.layers.1.self_attention.linear_qkv"
    by_name = {piece.theirs[0]: piece for piece in pieces(settings)}
    query, key_value = by_name[f"{name}.bias"].to_ours((rows,))
    blocks = rows.reshape(8, 16)  # q0 q1 k0 v0 q2 q3 k1 v1
    np.testing.assert_array_equal(query, blocks[[0, 1, 4, 5]])
    np.testing.assert_array_equal(key_value, blocks[[[2, 3], [6, 7]]])
    matrix = rows[:, None] + np.arange(64, dtype=np.float32) / 64
    query, key_value = by_name[f"{name}.weight"].to_ours((matrix,))
    np.testing.assert_array_equal(query[5, 2], matrix[64:80, 5])
    np.testing.assert_array_equal(key_value[5, 1, 0], matrix[96:112, 5])


def test_a_gated_layer_has_gate_rows_then_up_rows() -> None:
    settings = reference_settings("llama_like")
    piece = next(p for p in pieces(settings) if p.theirs[0] == "decoder.layers.0.mlp.linear_fc1.weight")
    theirs = np.arange(320 * 64, dtype=np.float32).reshape(320, 64)
    (ours,) = piece.to_ours((theirs,))
    np.testing.assert_array_equal(ours[:, 0], theirs[:160].T)
    np.testing.assert_array_equal(ours[:, 1], theirs[160:].T)


VARIANTS = {
    "gpt": reference_settings("gpt_gelu"),
    "llama": reference_settings("llama_like"),
    "qkv bias": reference_settings("llama_like", use_qkv_bias=True),
    "head norms": changed(reference_settings("llama_like"), attention={"qk_norm": "RMSNorm"}),
    "head norms with bias": changed(reference_settings("gpt_gelu"), attention={"qk_norm": "LayerNorm"}),
    "padding": changed(reference_settings("gpt_gelu"), vocab_size=120),
    "padding and own output": changed(reference_settings("llama_like"), vocab_size=120),
    "padding that is trained": changed(reference_settings("gpt_gelu"), vocab_size=120, mask_padded_vocab=False),
    "no positions": changed(reference_settings("gpt_gelu"), position_embedding="none", max_positions=32),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_fill_each_slot_once_use_each_tensor_once_and_lose_nothing(variant: str) -> None:
    settings = VARIANTS[variant]
    found, expected = pieces(settings), shapes(settings)
    assert len(set(names(found))) == len(names(found))
    wanted = [Slot(p, n) for p, s in expected.items() for n in (range(s[0]) if p.startswith("layers/") else [None])]
    assert sorted(slots(found), key=str) == sorted(wanted, key=str)
    generator = np.random.default_rng(0)
    ours = {path: generator.standard_normal(shape).astype(np.float32) for path, shape in expected.items()}
    theirs = all_theirs(found, ours)
    assert {name: a.shape for name, a in theirs.items()} == {p.theirs[0]: p.their_shapes[0] for p in found}
    assert_same(all_ours(found, theirs), ours)


@pytest.mark.parametrize("model", ["gpt_gelu", "llama_like"])
def test_padded_rows_are_cut_on_import_and_zero_on_export(model: str) -> None:
    weights = recorded(model, "weights")
    settings = dataclasses.replace(reference_settings(model), vocab_size=120)
    ours = all_ours(pieces(settings), weights)
    assert ours["embedding/word/embedding"].shape == (120, 64)
    back = all_theirs(pieces(dataclasses.replace(settings, padded_vocab_size=130)), ours)
    tables = ["embedding.word_embeddings.weight", *(["output_layer.weight"] if model == "llama_like" else [])]
    for name in tables:
        np.testing.assert_array_equal(back[name][:120], weights[name][:120])
        assert back[name].shape == (130, 64)
        assert not back[name][120:].any()


def test_a_vocabulary_that_does_not_fit_is_named() -> None:
    settings = reference_settings("gpt_gelu")
    with pytest.raises(UsageError, match="got 127 rows, expected at least 128"):
        pieces(settings, 127)
    trained = dataclasses.replace(settings, mask_padded_vocab=False)
    with pytest.raises(UsageError, match=r"got 256 rows, expected 128, .* --padded-vocab-size"):
        pieces(trained, 256)


def test_names_in_a_checkpoint_are_stacked_and_norms_go_by_what_follows_them() -> None:
    expected = {
        "decoder.layers.11.input_layernorm.weight": ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", 11),
        "decoder.layers.0.pre_mlp_layernorm.bias": ("decoder.layers.mlp.linear_fc1.layer_norm_bias", 0),
        "decoder.layers.3.mlp.linear_fc2.weight": ("decoder.layers.mlp.linear_fc2.weight", 3),
        "decoder.layers.3.self_attention.q_layernorm.weight": ("decoder.layers.self_attention.q_layernorm.weight", 3),
        "decoder.final_layernorm.weight": ("decoder.final_layernorm.weight", None),
    }
    assert {name: (stored(name).path, stored(name).layer) for name in expected} == expected


# ---- import -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_recorded_checkpoint_imports_to_bit_equal_weights(name: str, folder: Path, tmp_path: Path) -> None:
    settings = reference_settings(CHECKPOINTS[name])
    ours = imported(folder / name, settings, tmp_path)
    assert {a.dtype for n, a in ours.arrays.items() if n != "step"} == {"float32"}
    assert int(ours.read("step")) == 0
    assert_same(all_theirs(pieces(settings), below(ours, "parameters/")), recorded(CHECKPOINTS[name], "weights"))


def test_the_optimizers_state_is_imported_with_its_fp32_weights(folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings()
    ours = imported(folder / TINY, settings, tmp_path, optimizer=True)
    assert_same(all_theirs(pieces(settings), below(ours, "parameters/")), by_layer(folder / TINY))
    reader = TorchDistReader(folder / TINY)
    for theirs, prefix in (("exp_avg", "optimizer/0/mu"), ("exp_avg_sq", "optimizer/0/nu")):
        read = lambda name: reader.read(f"optimizer.state.{theirs}.{name}")  # noqa: B023, E731
        up, down = (read(f"decoder.layers.mlp.linear_fc{n}.weight") for n in (1, 2))
        np.testing.assert_array_equal(ours.read(f"{prefix}/layers/mlp/up/kernel"), up.transpose(0, 2, 1))
        np.testing.assert_array_equal(ours.read(f"{prefix}/layers/mlp/down/kernel"), down.transpose(0, 2, 1))
        table = read("embedding.word_embeddings.weight")
        np.testing.assert_array_equal(ours.read(f"{prefix}/embedding/word/embedding"), table)
        norm = read("decoder.layers.self_attention.linear_qkv.layer_norm_bias")
        np.testing.assert_array_equal(ours.read(f"{prefix}/layers/input_norm/bias"), norm)
        qkv = read("decoder.layers.self_attention.linear_qkv.weight")
        query = ours.read(f"{prefix}/layers/attention/query/kernel")
        np.testing.assert_array_equal(query[1, :, 1], qkv[1, 48:64].T)
    counts = {name: int(ours.read(name)) for name in ours.arrays if name == "step" or name.endswith("/count")}
    assert len(counts) == 5
    assert set(counts.values()) == {3}


def test_an_import_has_exactly_the_arrays_that_a_run_saves(folder: Path) -> None:
    settings = tiny_settings()
    specs = partition.map_specs(lambda s: partition.canonical(s, {}), gpt_specs(settings, LayerParallel()))
    parameters = partition.map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs)
    moments = jax.eval_shape(build_optimizer(OPTIMIZER, SCHEDULE, specs).init, parameters)
    saved = named_arrays(TrainState(jax.ShapeDtypeStruct((), jnp.int32), parameters, None, moments))
    plan = plan_import(TorchDistReader(folder / TINY), settings, optimizer=True)
    assert plan.layout == {name: (array.shape, array.dtype) for name, array in saved.items()}
    assert (plan.iteration, plan.updates, plan.samples) == (3, 3, 24)


@pytest.mark.parametrize("name", [FLAT, TINY])
def test_weights_come_without_the_optimizer_too(name: str, folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings()
    ours = imported(folder / name, settings, tmp_path)
    assert_same(all_theirs(pieces(settings), below(ours, "parameters/")), by_layer(folder / name))
    assert not [n for n in ours.arrays if n.startswith("optimizer/")]
    assert int(ours.read("step")) == 3


def test_each_tensor_has_its_line(folder: Path) -> None:
    reader = TorchDistReader(folder / TINY)
    lines = plan_import(reader, tiny_settings(), optimizer=True).lines
    said = [re.sub(r"\[\d+\]$", "", line.split(" -> ")[0]) for line in lines]
    assert set(said) == reader.tensors.keys() | reader.objects.keys()
    assert (
        "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight[1] ->"
        " optimizer/0/mu/layers/attention/query/kernel[1], optimizer/0/mu/layers/attention/key_value/kernel[1]"
    ) in lines
    assert "decoder.final_layernorm.bias -> (a copy of optimizer.state.param.decoder.final_layernorm.bias)" in lines


def test_an_import_that_was_killed_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, reader = reference_settings("llama_like"), TorchDistReader(folder / "llama_like_tp1")
    plan = plan_import(reader, settings)
    left = iter(range(7))
    original = StreamingWriter.write

    def killed(self: Any, *arguments: Any) -> None:
        next(left)
        original(self, *arguments)

    with monkeypatch.context() as patch, StreamingWriter(str(tmp_path), 0, plan.layout) as writer:
        patch.setattr(StreamingWriter, "write", killed)
        with pytest.raises(StopIteration):
            import_checkpoint(reader, plan, writer)
    read: list[str] = []
    whole = TorchDistReader.read
    monkeypatch.setattr(TorchDistReader, "read", lambda s, name, n=None: read.append(name) or whole(s, name, n))
    ours = imported(folder / "llama_like_tp1", settings, tmp_path)
    assert len(read) < len(plan.moves)
    assert_same(all_theirs(pieces(settings), below(ours, "parameters/")), recorded("llama_like", "weights"))


def test_half_precision_weights_become_fp32(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, whole = reference_settings("llama_like"), TorchDistReader.read
    half = lambda s, name, n=None: whole(s, name, n).astype(jnp.bfloat16)  # noqa: E731
    monkeypatch.setattr(TorchDistReader, "read", half)
    ours = imported(folder / "llama_like_tp1", settings, tmp_path)
    expected = {n: a.astype(jnp.bfloat16).astype(np.float32) for n, a in recorded("llama_like", "weights").items()}
    assert_same(all_theirs(pieces(settings), below(ours, "parameters/")), expected)


GPT = reference_settings("gpt_gelu")
MISFITS: dict[str, tuple[GPTSettings, list[str]]] = {
    "own output layer": (changed(GPT, tied=False), [r"output_layer.weight is missing, expected \[128, 64\]"]),
    "RMSNorm": (
        changed(GPT, layer={"normalization": "RMSNorm"}),
        [r"decoder.final_layernorm.bias \[64\] has no place", r"linear_fc1.layer_norm_bias \[4, 64\] has no place"],
    ),
    "more layers": (changed(GPT, num_layers=5), [r"linear_fc1.bias is \[4, 256\], expected \[5, 256\]"]),
    "wider": (
        changed(GPT, mlp={"ffn_hidden_size": 512}),
        [r"linear_fc2.weight is \[4, 64, 256\], expected \[4, 64, 512\]"],
    ),
    "fewer groups": (
        changed(GPT, attention={"num_kv_heads": 2}),
        [r"linear_qkv.bias is \[4, 192\], expected \[4, 128\]"],
    ),
    "no positions": (changed(GPT, position_embedding="rope"), [r"position_embeddings.weight \[32, 64\] has no place"]),
    "head norms": (changed(GPT, attention={"qk_norm": "LayerNorm"}), [r"q_layernorm.weight is missing"]),
    "a larger vocabulary": (
        changed(GPT, vocab_size=200, padded_vocab_size=256),
        ["got 128 rows, expected at least 200"],
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_missing_extra_and_misshapen_tensors_are_named(kind: str, folder: Path) -> None:
    settings, expected = MISFITS[kind]
    with pytest.raises(UsageError) as error:
        plan_import(TorchDistReader(folder / "gpt_gelu_tp1"), settings)
    for what in expected:
        assert re.search(what, str(error.value)), str(error.value)
    assert "fix: " in str(error.value)


def test_a_tensor_of_whole_numbers_is_named(folder: Path) -> None:
    reader = TorchDistReader(folder / "gpt_gelu_tp1")
    reader.tensors["decoder.final_layernorm.bias"] = ((64,), np.dtype(np.int32))
    with pytest.raises(UsageError, match=r"final_layernorm\.bias has dtype int32"):
        plan_import(reader, GPT)


def test_a_checkpoint_of_two_expert_ranks_imports_and_exports_with_every_expert_in_its_place(
    folder: Path, tmp_path: Path
) -> None:
    settings = moe_settings()
    assert TorchDistReader(folder / "moe_ep2").tensors["decoder.layers.mlp.router.weight"][0] == (4, 4, 64)
    reader = imported(folder / "moe_ep2", settings, tmp_path / "ours")
    theirs = recorded("moe", "weights")
    for layer in range(4):
        for expert in range(4):
            name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
            down = reader.read("parameters/layers/moe/experts/down/kernel", layer)[expert]
            np.testing.assert_array_equal(down, theirs[name].T)
            up = reader.read("parameters/layers/moe/experts/up/kernel", layer)[expert]
            fc1 = theirs[name.replace("fc2", "fc1")]
            np.testing.assert_array_equal(up, np.stack([fc1[:48].T, fc1[48:].T], 1))
    found = options({**arguments(settings)}, TorchDistReader(folder / "moe_ep2").tensors)
    assert (found["num_experts"], found["moe_router_topk"], found["moe_ffn_hidden_size"]) == (4, 2, 48)


class Held(TorchDistReader):
    """A checkpoint of theirs in memory."""

    def __init__(self, tensors: dict[str, np.ndarray], common: dict[str, Any]) -> None:
        self.folder, self.common, self.objects, self._held = Path("held"), common, {}, tensors
        self.tensors = {key: (array.shape, array.dtype) for key, array in tensors.items()}

    def read(self, key: str, index: int | None = None) -> np.ndarray:
        return self._held[key] if index is None else self._held[key][index]


BIAS = "decoder.layers.mlp.router.expert_bias"


def test_the_bias_of_experts_is_a_buffer_in_fp32_of_which_their_optimizer_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported in half precision and imported again; all but the bias has its fp32 weight and both moments."""
    settings = moe_settings(score_function="sigmoid", expert_bias=True)
    specs = partition.map_specs(lambda s: partition.canonical(s, {}), gpt_specs(settings, LayerParallel()))
    parameters = partition.map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs)
    moments = jax.eval_shape(build_optimizer(OPTIMIZER, SCHEDULE, specs).init, parameters)
    state = named_arrays(TrainState(jax.ShapeDtypeStruct((), jnp.int32), parameters, None, moments))
    generator = np.random.default_rng(0)
    ours = {
        name: generator.standard_normal(a.shape).astype(np.float32) if a.shape else np.array(3, np.int32)
        for name, a in state.items()
    }
    own = "layers/moe/router/expert_bias"
    for moment in ("mu", "nu"):  # it has no gradient
        ours[f"optimizer/0/{moment}/{own}"] = np.zeros((4, 4), np.float32)
    with StreamingWriter(str(tmp_path / "ours"), 3, {n: (a.shape, a.dtype) for n, a in ours.items()}) as writer:
        for name, array in ours.items():
            writer.write(name, array)
        writer.commit(meta(3))
    checkpoint, _ = find(str(tmp_path / "ours"))
    assert checkpoint is not None

    written: list[Any] = []
    monkeypatch.setattr(megatron.torch_dist, "write", lambda *given: written.extend(given[2:4]))
    common = optimizer_common(OPTIMIZER, SCHEDULE, 3)
    source = StreamingReader(checkpoint)
    export_checkpoint(source, settings, tmp_path / "t", 3, common=common, optimizer=True, dtype=jnp.bfloat16)
    tensors, content = written
    assert [t.name for t in tensors if "expert_bias" in t.name] == [BIAS]
    assert {t.name for t in tensors if not t.name.startswith("optimizer.") and t.dtype == np.float32} == {BIAS}
    theirs = {t.name: np.stack([t.read(n) for n in range(4)]) if t.stacked else t.read(None) for t in tensors}
    np.testing.assert_array_equal(theirs[BIAS], ours[f"parameters/{own}"])
    assert f"optimizer.state.exp_avg.{BIAS.replace('expert_bias', 'weight')}" in theirs

    plan = plan_import(Held(theirs, content), settings, optimizer=True)
    assert plan.layout == {name: (array.shape, array.dtype) for name, array in ours.items()}
    with StreamingWriter(str(tmp_path / "again"), 3, plan.layout) as writer:
        import_checkpoint(Held(theirs, content), plan, writer)
        writer.commit(meta(3))
    again, _ = find(str(tmp_path / "again"))
    assert again is not None
    assert_same(below(StreamingReader(again), ""), ours)
    with pytest.raises(UsageError, match=rf"optimizer\.state\.param\.{BIAS} .* has no place"):
        plan_import(Held({**theirs, f"optimizer.state.param.{BIAS}": theirs[BIAS]}, content), settings, optimizer=True)


def test_experts_are_refused_by_a_dense_model(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"tensors of experts, such as decoder\.layers\.mlp\.experts\.experts"):
        plan_import(TorchDistReader(folder / "moe_ep2"), reference_settings("llama_like"))


def test_flat_buckets_are_refused_by_name_with_the_ways_out(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"dp_reshardable.*--dist-ckpt-optim-fully-reshardable, or import the weights"):
        plan_import(TorchDistReader(folder / FLAT), tiny_settings(), optimizer=True)


def test_a_state_that_is_not_adams_is_refused(folder: Path) -> None:
    settings = tiny_settings()
    with pytest.raises(UsageError, match="the optimizer's state is not there"):
        plan_import(TorchDistReader(folder / "gpt_gelu_tp1"), GPT, optimizer=True)
    reader = TorchDistReader(folder / TINY)
    for name in [name for name in reader.tensors if ".exp_avg_sq." in name]:
        del reader.tensors[name]
    with pytest.raises(UsageError, match=r"state is \['exp_avg', 'param'\], expected"):
        plan_import(reader, settings, optimizer=True)
    reader = TorchDistReader(folder / TINY)
    reader.common["optimizer"]["optimizer"]["param_groups"][0]["step"] = 4.0
    with pytest.raises(UsageError, match="say step"):
        plan_import(reader, settings, optimizer=True)
    for value in (-1, 2.5, "3", None, 2**40):
        reader.common["iteration"] = value
        with pytest.raises(UsageError, match=r"iteration: got .* expected a count"):
            plan_import(reader, settings)


# ---- options ------------------------------------------------------------------------------------------------------
def test_options_of_the_recorded_checkpoints_are_those_of_their_models(folder: Path) -> None:
    reader = TorchDistReader(folder / "llama_like_tp1")
    assert options(reader.common["args"], reader.tensors) == {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "padded_vocab_size": 128,
        "untie_embeddings_and_output_weights": True,
        "disable_bias_linear": True,
        "add_qkv_bias": False,
        "normalization": "RMSNorm",
        "qk_layernorm": False,
        "ffn_hidden_size": 160,
        "kv_channels": 16,
        "num_query_groups": 2,
        "group_query_attention": True,
    }
    reader = TorchDistReader(folder / "gpt_gelu_pp2")
    found = options(reader.common["args"], reader.tensors)
    assert found["position_embedding_type"] == "learned_absolute"
    assert found["max_position_embeddings"] == 32
    assert not found["group_query_attention"]
    assert not found["disable_bias_linear"]


ARGUMENTS = {
    "gelu": (GPT, "gpt_gelu_tp1", {"activation": "gelu_tanh", "norm_epsilon": 1e-5}),
    "exact gelu": (changed(GPT, mlp={"activation": "gelu_erf"}), "gpt_gelu_tp1", {"activation": "gelu_erf"}),
    "swiglu": (
        reference_settings("llama_like"),
        "llama_like_tp1",
        {"activation": "swiglu", "position_embedding_type": "rope", "num_query_groups": 2, "rotary_percent": 1.0},
    ),
    "rope": (
        reference_settings("llama_like", rotary_dim=8, rotary_scaling=RotaryScaling(factor=4.0), window=8),
        "llama_like_tp1",
        {"rotary_percent": 0.5, "use_rope_scaling": True, "rope_scaling_factor": 4.0, "window_size": "8,0"},
    ),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_of_an_export_say_the_options_again(kind: str, folder: Path) -> None:
    settings, name, expected = ARGUMENTS[kind]
    found = options(arguments(settings), TorchDistReader(folder / name).tensors)
    assert expected.items() <= found.items()


def test_a_whole_namespace_is_understood(folder: Path) -> None:
    """Groups that do not count, classes as values, and what is not used."""
    reader = TorchDistReader(folder / "gpt_gelu_tp1")
    given = {
        **reader.common["args"],
        **{"group_query_attention": False, "num_query_groups": 1, "swiglu": False, "bias_gelu_fusion": True},
        **{"add_bias_linear": True, "params_dtype": object(), "num_experts": None, "softmax_type": "vanilla"},
        **{"window_size": None, "vocab_size": None, "position_embedding_type": "learned_absolute"},
    }
    found = options(given, reader.tensors)
    assert found["num_query_groups"] == 4
    assert found["activation"] == "gelu_tanh"
    assert "vocab_size" not in found
    assert "window_size" not in found


ROUTER = {
    "lists of one": (
        {"moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [0.01], "moe_router_dtype": "fp32"},
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01, "moe_router_dtype": "fp32"},
    ),
    "without effect": (
        {
            **{"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.01, "moe_router_pre_softmax": True},
            **{"moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 0.01},
            **{"moe_input_jitter_eps": None, "moe_apply_probs_on_input": False},
        },
        {"moe_router_load_balancing_type": "none", "moe_router_score_function": "sigmoid"},
    ),
}


@pytest.mark.parametrize("kind", ROUTER)
def test_arguments_of_a_router_are_taken_over_as_far_as_they_have_an_effect(kind: str, folder: Path) -> None:
    given, expected = ROUTER[kind]
    found = options({"num_experts": 4, **given}, TorchDistReader(folder / "moe_ep2").tensors)
    assert {name: found[name] for name in given if name in found} == expected
    settings = moe_settings(fp32=True)
    assert arguments(settings)["moe_router_dtype"] == "fp32"


UNUSABLE = {
    "probabilities on the input": ({"moe_apply_probs_on_input": True}, "args.moe_apply_probs_on_input: got True"),
    "jitter": ({"moe_input_jitter_eps": 0.1}, "args.moe_input_jitter_eps: got 0.1"),
    "several balancing types": (
        {"num_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
        r"args\.moe_router_load_balancing_type: got \['aux_loss', 'seq_aux_loss'\]",
    ),
    "several coefficients": ({"num_experts": 4, "moe_aux_loss_coeff": [0.1, 0.2]}, r"args\.moe_aux_loss_coeff: got"),
    "experts in some layers": (
        {"num_experts": 8, "moe_layer_freq": 2},
        r"args\.moe_layer_freq: got 2 .* not implemented",
    ),
    "latent attention": ({"multi_latent_attention": True}, "args.multi_latent_attention"),
    "yarn": ({"position_embedding_type": "yarn"}, "args.position_embedding_type: got 'yarn'"),
    "other layers": ({"num_layers": 6}, "num_layers: the checkpoint's arguments say 6, its tensors 4"),
    "other groups": ({"group_query_attention": True, "num_query_groups": 2}, "say 2, its tensors 4"),
    "heads that divide nothing": ({"num_attention_heads": 7}, "args.num_attention_heads: got 7"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_is_not_there_here_or_contradicts_itself_is_named(kind: str, folder: Path) -> None:
    change, what = UNUSABLE[kind]
    reader = TorchDistReader(folder / "gpt_gelu_tp1")
    with pytest.raises(UsageError, match=what):
        options({**reader.common["args"], **change}, reader.tensors)


# ---- export -------------------------------------------------------------------------------------------------------
@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="writing needs torch, an optional dependency")


@pytest.mark.interop_torch
@pytest.mark.parametrize("name", [*CHECKPOINTS, TINY])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_an_export_with_every_key_of_the_original(
    torch: Any, name: str, folder: Path, tmp_path: Path
) -> None:
    """Equal shapes and values, tensors and the states of 8-bit arithmetic; then back again to the same arrays."""
    import torch.distributed.checkpoint as dcp

    with_state = name == TINY
    settings = tiny_settings() if with_state else reference_settings(CHECKPOINTS[name])
    ours = imported(folder / name, settings, tmp_path / "ours", optimizer=with_state)
    iteration = int(ours.read("step"))
    common = optimizer_common(OPTIMIZER, SCHEDULE, iteration) if with_state else None
    lines = export_checkpoint(ours, settings, tmp_path / "theirs", iteration, common=common, optimizer=with_state)
    assert len(lines) == len(set(lines)) == len(pieces(settings)) * (4 if with_state else 1)

    original = TorchDistReader(folder / name)
    described = dcp.FileSystemReader(tmp_path / "theirs" / f"iter_{iteration:07d}").read_metadata()
    assert described.state_dict_metadata.keys() == original.tensors.keys() | original.objects.keys()
    state = {
        key: torch.zeros(shape, dtype=getattr(torch, dtype.name)) for key, (shape, dtype) in original.tensors.items()
    }
    path = tmp_path / "theirs" / f"iter_{iteration:07d}"
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert_same({key: value.numpy() for key, value in state.items()}, {key: original.read(key) for key in state})

    again = TorchDistReader(tmp_path / "theirs")
    chunks = {key: [chunk.sizes for chunk in again._chunks[key]] for key in again.tensors}
    assert set(chunks["decoder.layers.mlp.linear_fc1.weight"]) == {
        (1, *original.tensors["decoder.layers.mlp.linear_fc1.weight"][0][1:])
    }
    for key in ("args", "iteration", "checkpoint_version", "content_metadata", "opt_param_scheduler", "optimizer"):
        if key in original.common:
            assert _differences(original.common[key], again.common[key]) == []
    back = imported(tmp_path / "theirs", settings, tmp_path / "back", optimizer=with_state)
    assert_same(below(back, ""), below(ours, ""))
    files = [sorted(os.listdir(p)) for p in (path, folder / name / f"iter_{iteration:07d}")]
    assert [f for f in files[1] if not f.endswith(".distcp")] == [f for f in files[0] if not f.endswith(".distcp")]


def _differences(theirs: Any, ours: Any, path: str = "") -> list[str]:
    """What the recording says and we say otherwise; arguments of the recording itself do not count."""
    if isinstance(theirs, dict):
        own = {"note", "seq_length", "consumed_train_samples", "tensor_model_parallel_size"}
        own |= {"pipeline_model_parallel_size"}
        keys = theirs.keys() - own
        return [line for key in keys for line in _differences(theirs[key], ours.get(key), f"{path}.{key}")]
    if isinstance(theirs, list):
        pairs = zip(theirs, ours, strict=True)
        return [line for n, (a, b) in enumerate(pairs) for line in _differences(a, b, f"{path}[{n}]")]
    same = theirs == pytest.approx(ours, rel=1e-12) if isinstance(theirs, float) else theirs == ours
    return [] if same else [f"{path}: {theirs!r}, got {ours!r}"]


@pytest.mark.interop_torch
def test_weights_may_be_exported_in_half_precision_and_padded(torch: Any, folder: Path, tmp_path: Path) -> None:
    settings = dataclasses.replace(reference_settings("llama_like"), vocab_size=120)
    ours = imported(folder / "llama_like_tp1", settings, tmp_path / "ours")
    wider = dataclasses.replace(settings, padded_vocab_size=160)
    export_checkpoint(ours, wider, tmp_path / "theirs", 0, dtype=jnp.bfloat16)
    reader, weights = TorchDistReader(tmp_path / "theirs"), recorded("llama_like", "weights")
    assert {dtype.name for _, dtype in reader.tensors.values()} == {"bfloat16"}
    table = reader.read("output_layer.weight")
    np.testing.assert_array_equal(table[:120], weights["output_layer.weight"][:120].astype(jnp.bfloat16))
    assert table.shape == (160, 64)
    assert not table[120:].any()
    assert reader.common["args"]["padded_vocab_size"] == 160


def test_an_export_that_does_not_fit_writes_nothing(folder: Path, tmp_path: Path) -> None:
    ours = imported(folder / "gpt_gelu_tp1", GPT, tmp_path / "ours")
    target = tmp_path / "theirs"
    for settings, what in (
        (changed(GPT, tied=False), r"parameters/output/kernel is missing, expected \[64, 128\]"),
        (changed(GPT, num_layers=3), r"parameters/layers/attention/output/bias is \[4, 64\], expected \[3, 64\]"),
        (changed(GPT, position_embedding="rope"), r"position/embedding \[32, 64\] has no place"),
    ):
        with pytest.raises(UsageError, match=what):
            export_checkpoint(ours, settings, target, 0)
    with pytest.raises(UsageError, match="optimizer/0/mu/embedding/position/embedding is missing"):
        export_checkpoint(ours, GPT, target, 0, optimizer=True)
    with pytest.raises(UsageError, match="--activation quick_gelu: Megatron-LM has no option"):
        export_checkpoint(ours, changed(GPT, mlp={"activation": "quick_gelu"}), target, 0)
    assert not target.exists()


def test_the_optimizers_part_of_an_export_says_where_the_schedules_stand() -> None:
    decay = WeightDecaySchedule(style="linear", start=0.0, end=0.1, steps=80.0, samples_per_update=8)
    found = optimizer_common(dataclasses.replace(OPTIMIZER, weight_decay=decay), SCHEDULE, 5)
    first, second = found["optimizer"]["optimizer"]["param_groups"]
    assert (first["step"], second["step"]) == (5.0, 5.0)
    assert first["weight_decay"] == pytest.approx(0.05)
    assert second["weight_decay"] == 0.0
    assert found["opt_param_scheduler"]["num_steps"] == 40
    with pytest.raises(UsageError, match="--optimizer lion"):
        optimizer_common(OptimizerSettings("lion"), SCHEDULE, 5)
    assert megatron._num_updates("x", found) == 5
