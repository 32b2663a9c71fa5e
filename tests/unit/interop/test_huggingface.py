"""Hugging Face's folders: the logits of transformers after import, equal files after export, and what is refused.

Tests with `families` need transformers and torch (the extras hf and torch) and are skipped without them.
"""

import dataclasses
import functools
import json
import math
import os
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from compiled_support import program_of
from golden.megatron_weights import nested
from jax.sharding import PartitionSpec as P
from layer_support import QUICK_COMPILE
from safetensors.numpy import load_file, save_file
from support import as_batch
from tolerances import LOGITS_ABSOLUTE, LOSS_RELATIVE

from jmegatron import partition
from jmegatron.checkpoint.writer import CheckpointWriter
from jmegatron.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig, resolve, validate
from jmegatron.errors import ConfigError
from jmegatron.interop.huggingface import (
    COMPANIONS,
    FREE_OPTIONS,
    SafetensorsFolder,
    SafetensorsWriter,
    UsedOnce,
    config_text,
    load_config_json,
    match_tensors,
    options_of,
    pieces,
    read_companions,
    read_config,
    stored_dtype,
    tensor_shapes,
    write_config,
)
from jmegatron.interop.pieces import names, slots
from jmegatron.mesh import build_mesh
from jmegatron.models.gpt import gpt_logits, gpt_specs
from jmegatron.models.transformer import LayerParallel
from jmegatron.training.build import gpt_settings
from jmegatron.training.convert import export_huggingface, find, import_huggingface
from jmegatron.training.step import make_eval_step

LLAMA = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
GPT2 = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=40)
IDS = dict(bos_token_id=1, eos_token_id=2)
FAMILIES = {
    "gpt2": ("GPT2", dict(GPT2)),
    "gpt2_untied_erf": ("GPT2", GPT2 | dict(tie_word_embeddings=False, activation_function="gelu", n_inner=80)),
    "llama": ("Llama", LLAMA | dict(num_key_value_heads=4)),
    "llama_llama3": (
        "Llama",
        LLAMA
        | dict(
            head_dim=16,  # of the 8 frequencies 5 are kept, 1 is mixed, 2 are slowed down
            rope_theta=2e4,
            rope_scaling=dict(
                rope_type="llama3",
                factor=32.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            tie_word_embeddings=True,
        ),
    ),
    "llama_linear_biases": (
        "Llama",
        LLAMA | dict(rope_scaling=dict(rope_type="linear", factor=2.0), attention_bias=True, mlp_bias=True),
    ),
    "mistral_window": ("Mistral", LLAMA | dict(sliding_window=5, head_dim=6)),
    "qwen2": ("Qwen2", LLAMA | dict(tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh")),
    "qwen2_window": ("Qwen2", LLAMA | dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)),
    "qwen3": ("Qwen3", LLAMA | dict(head_dim=16, rms_norm_eps=1e-5)),
    "mixtral": ("Mixtral", LLAMA | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
}
DIVIDED = {"llama_tied": ("Llama", LLAMA | dict(num_hidden_layers=4, tie_word_embeddings=True))}
"""For runs on several devices: 4 heads, 2 groups of keys, 8 channels a head."""
CONFIG_JSON = {
    "gpt2": GPT2 | dict(model_type="gpt2", architectures=["GPT2LMHeadModel"]),
    "llama": LLAMA | dict(model_type="llama", architectures=["LlamaForCausalLM"]),
    "mistral": LLAMA | dict(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None),
    "qwen2": LLAMA | dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
    "qwen3": LLAMA | dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=16),
    "mixtral": LLAMA | dict(model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=4),
}
"""What a config.json must say at least."""
TOKENS = np.random.default_rng(3).integers(0, 61, (2, 33))


def config_of(options, **model) -> Config:
    config = Config(
        model=ModelConfig(**{"seq_length": 32, **options, **model}),
        data=DataConfig(mock_data=True),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=1, train_iters=1),
    )
    validate(config)
    return resolve(config, data_parallel_size=1)


def imported(folder, options) -> dict[str, np.ndarray]:
    """Our arrays by path, layers stacked, the vocabulary without padding."""
    source, matched = SafetensorsFolder(folder), match_tensors(SafetensorsFolder(folder), options)
    parts: dict = {}
    for piece in matched.pieces:
        for slot, value in zip(piece.ours, piece.to_ours(tuple(source.read(n) for n in piece.theirs)), strict=True):
            parts.setdefault(slot.path, {})[slot.layer] = value
    return {
        path: layers[None] if None in layers else np.stack([layers[i] for i in range(len(layers))])
        for path, layers in parts.items()
    }


def export(folder, config, arrays, fields) -> None:
    with SafetensorsWriter(folder, tensor_shapes(config), stored_dtype(fields), max_shard_bytes=20000) as target:
        for piece in pieces(config):
            ours = tuple(arrays[s.path] if s.layer is None else arrays[s.path][s.layer] for s in piece.ours)
            for name, value in zip(piece.theirs, piece.to_theirs(ours), strict=True):
                target.write(name, value)
        target.add_file("config.json", config_text(fields))
        target.commit()


def padded(arrays, settings) -> dict:
    """The nested parameters with rows of zeros behind the vocabulary."""
    more = settings.padded_vocab_size - settings.vocab_size
    pads = {"embedding/word/embedding": ((0, more), (0, 0)), "output/kernel": ((0, 0), (0, more))}
    return nested({path: np.pad(a, pads[path]) if path in pads else a for path, a in arrays.items()})


def logits_at(config, arrays, tp: int) -> np.ndarray:
    settings, parallel = gpt_settings(config, "cpu"), LayerParallel("tp", tp)
    mesh, specs = build_mesh(jax.devices()[:tp], tp=tp), gpt_specs(settings, parallel)
    mapped = jax.shard_map(
        lambda parameters, tokens: gpt_logits(parameters, tokens, settings, parallel),
        mesh=mesh,
        in_specs=(partition.partition_specs(specs), P()),
        out_specs=P(None, None, "tp"),
    )
    parameters = jax.device_put(padded(arrays, settings), partition.shardings(specs, mesh))
    run = jax.jit(mapped, compiler_options=QUICK_COMPILE)
    return np.asarray(run(parameters, TOKENS[:, :-1].astype(np.int32)))[..., : settings.vocab_size]


# ---- with transformers ----------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Reference:
    folder: str
    logits: np.ndarray
    loss: float


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Makes a tiny random model of a family, once."""
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    @functools.cache
    def make(name: str, dtype: str = "float32") -> Reference:
        family, fields = {**FAMILIES, **DIVIDED}[name]
        torch.manual_seed(0)
        head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
        model = getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**fields, **IDS)).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # fresh biases are 0 and scales 1: mistakes would not show
                parameter += 0.2 * torch.randn_like(parameter)
        model = model.to(getattr(torch, dtype))
        folder = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folder, max_shard_size="20KB")
        return Reference(folder, *outputs(model))

    def outputs(model):
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS[:, :-1])).logits.float()
        losses = torch.nn.functional.cross_entropy(logits.reshape(-1, 61), torch.tensor(TOKENS[:, 1:]).reshape(-1))
        return logits.numpy(), float(losses)

    make.load = lambda folder: outputs(transformers.AutoModelForCausalLM.from_pretrained(folder).eval())
    return make


def assert_logits(got, expected) -> None:
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error <= LOGITS_ABSOLUTE, f"logits differ by {error:.1e}"


@pytest.mark.interop_torch
@pytest.mark.parametrize("name", FAMILIES)
def test_an_imported_models_logits_equal_those_of_transformers(families, name):
    reference = families(name)
    options = read_config(reference.folder)
    assert_logits(logits_at(config_of(options), imported(reference.folder, options), 1), reference.logits)


@pytest.mark.interop_torch
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama_llama3", dict(rope_scaling_factor=8.0)),
        ("llama_linear_biases", dict(rotary_seq_len_interpolation_factor=None)),
        ("mistral_window", dict(window_size="5,0")),
        ("qwen2_window", dict(window_size="2,0")),
        ("qwen3", dict(norm_epsilon=1e-4)),
        ("gpt2_untied_erf", dict(activation="gelu_tanh")),
    ],
)
def test_logits_differ_where_an_option_differs(families, name, change):
    """So that the test above cannot pass on an option that nothing reads."""
    reference = families(name)
    options = read_config(reference.folder)
    got = logits_at(config_of(options | change), imported(reference.folder, options), 1)
    assert np.abs(got - reference.logits).max() > 3 * LOGITS_ABSOLUTE * np.abs(reference.logits).max()


@pytest.mark.interop_torch
@pytest.mark.parametrize(("name", "tp"), [("gpt2", 4), ("qwen2", 4), ("llama_tied", 2), ("llama_tied", 4)])
def test_logits_equal_those_of_transformers_on_several_tensor_parallel_devices(families, name, tp):
    reference = families(name)
    options = read_config(reference.folder)
    assert_logits(logits_at(config_of(options), imported(reference.folder, options), tp), reference.logits)


PIPELINES = {
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2-v2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "pp2-tp2": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
}


@pytest.mark.interop_torch
@pytest.mark.parametrize("layout", PIPELINES)
def test_the_loss_of_every_token_equals_that_of_transformers_in_a_pipeline(families, tmp_path, layout):
    """Tied embeddings, stages in the middle and stages of several chunks; the export has the head as it came: not.

    The executor gives no logits, only a weighted sum of losses: a weight on one token after the other gives each.
    """
    reference = families("llama_tied")
    ours = tmp_path / "ours"
    import_huggingface(reference.folder, str(ours), [], lambda line: None)
    devices, words = PIPELINES[layout]
    run = f"--config {ours / 'model.yaml'} --seq-length 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 1"
    program = program_of([*run.split(), "--lr", "1e-3", "--mock-data", *words.split()], "cpu", devices)
    wanted = {n: a for n, a in program.saved_layout().items() if n == "step" or n.startswith("parameters/")}
    checkpoint = find(str(ours), None, lambda line: None)
    state = program.state_of(checkpoint.read(wanted))
    step = jax.jit(make_eval_step(program.settings, program.mesh), compiler_options=QUICK_COMPILE)
    arrays = {
        "tokens": TOKENS[:, :-1].astype(np.int32),
        "labels": TOKENS[:, 1:].astype(np.int32),
        "sample_ids": np.arange(2, dtype=np.uint32),
    }
    losses = np.zeros((2, 32))
    for row, place in np.ndindex(losses.shape):
        mask = np.zeros((2, 32), np.float32)
        mask[row, place] = 1.0
        sums = step(state.parameters, as_batch({**arrays, "loss_mask": mask}, 2, program.mesh))
        assert sums["num_tokens"] == 1.0
        losses[row, place] = sums["loss_sum"]
    logits = reference.logits.astype(np.float64)
    chosen = np.take_along_axis(logits, TOKENS[:, 1:, None], -1)[..., 0]
    expected = np.log(np.exp(logits).sum(-1)) - chosen
    assert np.abs(losses - expected).max() <= LOSS_RELATIVE * np.abs(expected).max()
    if layout == "pp2-v2":
        writer = CheckpointWriter(str(tmp_path / "saved"), in_background=False)
        writer.save(0, program.saved_arrays(state), checkpoint.manifest.meta)
        saved = find(str(tmp_path / "saved"), None, lambda line: None)
        export_huggingface(saved, str(tmp_path / "back"), reference.folder, None, lambda line: None)
        assert_equal_files(tmp_path / "back", reference.folder, "F32")
        assert not [name for name in SafetensorsFolder(tmp_path / "back").tensors if "lm_head" in name]


@pytest.mark.interop_torch
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, dtype) for name in FAMILIES for dtype in ("float32", "bfloat16")), ("llama", "float16")],
)
def test_export_gives_back_every_tensor_bit_for_bit_and_every_field_of_the_config(families, tmp_path, name, dtype):
    reference = families(name, dtype)
    original = load_config_json(reference.folder)
    options = options_of(original)
    config = config_of(options)
    export(tmp_path / "x", config, imported(reference.folder, options), write_config(config, original))
    assert json.loads((tmp_path / "x" / "config.json").read_text()) == original
    assert_equal_files(tmp_path / "x", reference.folder, stored_dtype(original))
    # Both loaded: what was cast after it was made has rotary frequencies in half precision as well.
    np.testing.assert_array_equal(families.load(tmp_path / "x")[0], families.load(reference.folder)[0])


def assert_equal_files(got, expected, dtype) -> None:
    """By the safetensors package, and by the dtypes in the headers."""
    read = lambda folder: {  # noqa: E731
        name: value
        for file in sorted(os.listdir(folder))
        if file.endswith(".safetensors")
        for name, value in load_file(os.path.join(folder, file)).items()
    }
    got_tensors, expected_tensors = read(got), read(expected)
    assert got_tensors.keys() == expected_tensors.keys()
    for name, value in expected_tensors.items():
        assert got_tensors[name].dtype == value.dtype, name
        assert got_tensors[name].tobytes() == value.tobytes(), name
    assert {record.dtype for record in SafetensorsFolder(got).tensors.values()} == {dtype}


@pytest.mark.interop_torch
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_never_was_in_a_folder_of_theirs_runs_in_transformers(families, tmp_path, name):
    reference = families(name)
    options = read_config(reference.folder)
    config = config_of(options)
    fields = write_config(config)
    assert options_of(fields) == options
    export(tmp_path / "x", config, imported(reference.folder, options), fields)
    logits, _ = families.load(tmp_path / "x")
    np.testing.assert_array_equal(logits, reference.logits)


# ---- layouts, without transformers --------------------------------------------------------------------------------
def random_tensors(fields, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in tensor_shapes(options_of(fields)).items()}


def write_folder(folder, fields, tensors) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")


VARIANTS = {
    **CONFIG_JSON,
    "llama_biases": CONFIG_JSON["llama"] | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "gpt2_untied": CONFIG_JSON["gpt2"] | dict(tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_pieces_fill_the_whole_of_our_arrays_and_are_inverse(tmp_path, name):
    fields = VARIANTS[name]
    tensors = random_tensors(fields)
    write_folder(tmp_path, fields, tensors)
    config = config_of(options_of(fields), padded_vocab_size=61)
    specs = gpt_specs(gpt_settings(config, "cpu"), LayerParallel())
    arrays = imported(tmp_path, options_of(fields))
    assert {path: a.shape for path, a in arrays.items()} == {
        path: spec.shape for path, spec in partition.named_specs(specs)
    }
    found = pieces(config)
    assert len(set(slots(found))) == len(slots(found))
    assert sorted(names(found)) == sorted(tensors)
    for piece in found:
        ours = tuple(arrays[s.path] if s.layer is None else arrays[s.path][s.layer] for s in piece.ours)
        for tensor, value in zip(piece.theirs, piece.to_theirs(ours), strict=True):
            np.testing.assert_array_equal(value, tensors[tensor])


def test_a_llama_layers_products_equal_those_of_torchs_layout(tmp_path):
    fields = VARIANTS["llama_biases"]
    t = random_tensors(fields)
    write_folder(tmp_path, fields, t)
    ours = {path: a[1] for path, a in imported(tmp_path, options_of(fields)).items() if path.startswith("layers/")}
    x = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    theirs = lambda name, x: t[f"model.layers.1.{name}.weight"] @ x + t[f"model.layers.1.{name}.bias"]  # noqa: E731
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    query = np.einsum("h,hnd->nd", x, ours["layers/attention/query/kernel"]) + ours["layers/attention/query/bias"]
    close(query, theirs("self_attn.q_proj", x).reshape(4, 8))
    pair = np.einsum("h,hgkd->gkd", x, ours["layers/attention/key_value/kernel"])
    pair = pair + ours["layers/attention/key_value/bias"]
    close(pair[:, 0], theirs("self_attn.k_proj", x).reshape(2, 8))
    close(pair[:, 1], theirs("self_attn.v_proj", x).reshape(2, 8))
    out = np.einsum("nd,ndh->h", query, ours["layers/attention/output/kernel"]) + ours["layers/attention/output/bias"]
    close(out, theirs("self_attn.o_proj", query.reshape(-1)))
    gate, up = np.einsum("h,hkf->kf", x, ours["layers/mlp/up/kernel"]) + ours["layers/mlp/up/bias"]
    close(gate, theirs("mlp.gate_proj", x))
    close(up, theirs("mlp.up_proj", x))
    close(gate @ ours["layers/mlp/down/kernel"] + ours["layers/mlp/down/bias"], theirs("mlp.down_proj", gate))


def test_a_gpt2_layers_queries_keys_and_values_stand_side_by_side(tmp_path):
    t = random_tensors(CONFIG_JSON["gpt2"])
    write_folder(tmp_path, CONFIG_JSON["gpt2"], t)
    ours = {path: a[1] for path, a in imported(tmp_path, options_of(CONFIG_JSON["gpt2"])).items() if "layers" in path}
    x = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    query, key, value = np.split(x @ t["transformer.h.1.attn.c_attn.weight"] + t["transformer.h.1.attn.c_attn.bias"], 3)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    got = np.einsum("h,hnd->nd", x, ours["layers/attention/query/kernel"]) + ours["layers/attention/query/bias"]
    close(got, query.reshape(4, 8))
    pair = np.einsum("h,hgkd->gkd", x, ours["layers/attention/key_value/kernel"])
    pair = pair + ours["layers/attention/key_value/bias"]
    close(pair, np.stack([key.reshape(4, 8), value.reshape(4, 8)], axis=1))
    inner = x @ ours["layers/mlp/up/kernel"] + ours["layers/mlp/up/bias"]
    close(inner, x @ t["transformer.h.1.mlp.c_fc.weight"] + t["transformer.h.1.mlp.c_fc.bias"])


# ---- tensors that do not fit --------------------------------------------------------------------------------------
def test_missing_extra_and_misshapen_tensors_are_named_in_one_message(tmp_path):
    fields = CONFIG_JSON["llama"]
    tensors = random_tensors(fields)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros(3, np.float32)
    tensors["model.norm.weight"] = np.zeros(31, np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].astype(np.int8)
    write_folder(tmp_path, fields, tensors)
    with pytest.raises(ConfigError) as error:
        match_tensors(SafetensorsFolder(tmp_path), options_of(fields))
    message = str(error.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "not known: model.layers.2.mlp.up_proj.weight" in message
    assert "model.norm.weight has shape [31], expected [32]" in message
    assert "model.layers.0.mlp.up_proj.weight has dtype I8" in message
    assert message.count("expected:") == 1


def test_masks_frequencies_and_the_copy_of_a_tied_output_layer_are_left_out_and_named(tmp_path):
    fields = CONFIG_JSON["llama"] | dict(tie_word_embeddings=True)
    tensors = random_tensors(fields)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write_folder(tmp_path, fields, tensors)
    matched = match_tensors(SafetensorsFolder(tmp_path), options_of(fields))
    assert matched.left_out == ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    tensors["lm_head.weight"][0, 0] += 1
    write_folder(tmp_path, fields, tensors)
    with pytest.raises(ConfigError, match=r"not known: lm_head.* it is not the word embedding"):
        match_tensors(SafetensorsFolder(tmp_path), options_of(fields))


def test_names_without_prefix_as_in_the_first_gpt2_are_known(tmp_path):
    fields = CONFIG_JSON["gpt2"]
    tensors = {name.removeprefix("transformer."): value for name, value in random_tensors(fields).items()}
    tensors["h.0.attn.bias"] = np.ones((1, 1, 40, 40), np.float32)
    write_folder(tmp_path, fields, tensors)
    matched = match_tensors(SafetensorsFolder(tmp_path), options_of(fields))
    assert matched.left_out == ("h.0.attn.bias",)
    np.testing.assert_array_equal(
        imported(tmp_path, options_of(fields))["embedding/word/embedding"], tensors["wte.weight"]
    )


def test_used_once_names_what_was_not():
    used = UsedOnce(["a", "b", "c"])
    used.use("a", "b", "b", "d")
    with pytest.raises(ValueError, match=re.escape("b, c, d")):
        used.check()
    used = UsedOnce(["a", "b"])
    used.use("b")
    used.use("a")
    assert used.check() == "2 tensors, each used once"


# ---- config.json ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CONFIG_JSON)
def test_every_option_of_the_model_is_given_and_makes_a_valid_config(name):
    options = options_of(CONFIG_JSON[name])
    assert options.keys() == {field.name for field in dataclasses.fields(ModelConfig)} - set(FREE_OPTIONS)
    assert options_of(write_config(config_of(options), CONFIG_JSON[name])) == options


PUBLISHED = {
    "gpt2": (
        124_439_808,
        dict(activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1, bos_token_id=50256)
        | dict(embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="gpt2")
        | dict(n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024, resid_pdrop=0.1, vocab_size=50257)
        | dict(summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True, summary_use_proj=True)
        | dict(task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}),
    ),
    "Llama-3.1-8B": (
        8_030_261_248,
        dict(architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000)
        | dict(eos_token_id=128001, hidden_act="silu", hidden_size=4096, initializer_range=0.02, model_type="llama")
        | dict(intermediate_size=14336, max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32)
        | dict(num_hidden_layers=32, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05, rope_theta=500000.0)
        | dict(tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, vocab_size=128256)
        | dict(
            rope_scaling=dict(
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
                rope_type="llama3",
            )
        ),
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        dict(architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000)
        | dict(eos_token_id=128001, head_dim=64, hidden_act="silu", hidden_size=2048, initializer_range=0.02)
        | dict(intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32)
        | dict(num_hidden_layers=16, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05, rope_theta=500000.0)
        | dict(tie_word_embeddings=True, torch_dtype="bfloat16", use_cache=True, vocab_size=128256, model_type="llama")
        | dict(
            rope_scaling=dict(
                factor=32.0,
                high_freq_factor=4.0,
                low_freq_factor=1.0,
                original_max_position_embeddings=8192,
                rope_type="llama3",
            )
        ),
    ),
    "SmolLM2-135M": (
        134_515_008,
        dict(architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0)
        | dict(eos_token_id=0, hidden_act="silu", hidden_size=576, initializer_range=0.041666666666666664)
        | dict(intermediate_size=1536, is_llama_config=True, max_position_embeddings=8192, model_type="llama")
        | dict(num_attention_heads=9, num_hidden_layers=30, num_key_value_heads=3, pretraining_tp=1, rms_norm_eps=1e-05)
        | dict(rope_interleaved=False, rope_scaling=None, rope_theta=100000, tie_word_embeddings=True, mlp_bias=False)
        | dict(torch_dtype="bfloat16", use_cache=True, vocab_size=49152),
    ),
    "Mistral-7B": (
        7_241_732_096,
        dict(architectures=["MistralForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=4096)
        | dict(initializer_range=0.02, intermediate_size=14336, max_position_embeddings=32768, model_type="mistral")
        | dict(num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-05)
        | dict(rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, torch_dtype="bfloat16")
        | dict(use_cache=True, vocab_size=32000),
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        dict(architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643, eos_token_id=151643)
        | dict(hidden_act="silu", hidden_size=896, initializer_range=0.02, intermediate_size=4864, model_type="qwen2")
        | dict(max_position_embeddings=32768, max_window_layers=24, num_attention_heads=14, num_hidden_layers=24)
        | dict(num_key_value_heads=2, rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=32768)
        | dict(tie_word_embeddings=True, torch_dtype="bfloat16", use_cache=True, use_sliding_window=False)
        | dict(vocab_size=151936),
    ),
    "Qwen3-0.6B": (
        596_049_920,
        dict(architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=151643)
        | dict(eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=1024, initializer_range=0.02)
        | dict(intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28, model_type="qwen3")
        | dict(num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-06)
        | dict(rope_scaling=None, rope_theta=1000000, sliding_window=None, tie_word_embeddings=True)
        | dict(torch_dtype="bfloat16", use_cache=True, use_sliding_window=False, vocab_size=151936),
    ),
}
"""Published models: number of their parameters, and what their config.json says."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_models_tensors_have_its_published_number_of_parameters(name):
    parameters, fields = PUBLISHED[name]
    assert sum(math.prod(shape) for shape in tensor_shapes(options_of(fields)).values()) == parameters
    config = config_of(options_of(fields))
    assert write_config(config, fields) == fields
    assert options_of(write_config(config)) == options_of(fields)


REFUSED = {
    "rope type": ("llama", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "yarn"),
    "old rope type": ("llama", dict(rope_scaling=dict(type="dynamic", factor=4.0)), "dynamic"),
    "longrope": ("llama", dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4)), "longrope"),
    "two rope types": ("llama", dict(rope_scaling=dict(type="linear", rope_type="llama3", factor=4.0)), "rope_type"),
    "llama3 of other length": (
        "llama",
        dict(
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=4096,
            )
        ),
        "original_max_position_embeddings: 4096",
    ),
    "llama3 without factors": ("llama", dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "low_freq_factor"),
    "rope of layer types": ("llama", dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), "full_attention"),
    "unknown rope field": ("llama", dict(rope_parameters=dict(rope_theta=1e4, mscale=2.0)), "mscale"),
    "two bases": ("llama", dict(rope_theta=1e6, rope_parameters=dict(rope_theta=1e4)), "rope_theta"),
    "partial rotary": ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "partial rotary inside": ("qwen2", dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor"),
    "interleaved": ("llama", dict(rope_interleaved=True), "rope_interleaved"),
    "activation": ("llama", dict(hidden_act="relu"), "hidden_act"),
    "activation of gpt2": ("gpt2", dict(activation_function="silu"), "activation_function"),
    "biases of attention alone": ("llama", dict(attention_bias=True), "attention_bias"),
    "biases of the mlp alone": ("llama", dict(mlp_bias=True), "mlp_bias"),
    "biases in qwen3": ("qwen3", dict(attention_bias=True), "attention_bias"),
    "mixed windows": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=8, layer_types=["full_attention", "sliding_attention"]),
        "layer_types",
    ),
    "window of upper layers": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "max_window_layers",
    ),
    "chunked attention": ("llama", dict(layer_types=["chunked_attention"] * 2), "layer_types"),
    "soft capping": ("llama", dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    "slices": ("llama", dict(pretraining_tp=2), "pretraining_tp"),
    "layer scale": ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    "no scale": ("gpt2", dict(scale_attn_weights=False), "scale_attn_weights"),
    "upcast": ("gpt2", dict(reorder_and_upcast_attn=True), "reorder_and_upcast_attn"),
    "cross attention": ("gpt2", dict(add_cross_attention=True), "add_cross_attention"),
    "two dropouts": ("gpt2", dict(embd_pdrop=0.0), "embd_pdrop"),
    "n_ctx": ("gpt2", dict(n_ctx=20), "n_ctx"),
    "pruned heads": ("gpt2", dict(pruned_heads={"0": [1]}), "pruned_heads"),
    "quantised": ("llama", dict(quantization_config=dict(bits=4)), "quantised"),
    "own code": ("llama", dict(auto_map=dict(AutoModel="m.M")), "auto_map"),
    "layers that differ": ("llama", dict(per_layer_config={"0": {"hidden_size": 3}}), "per_layer_config"),
    "unknown field": ("llama", dict(residual_multiplier=0.5), "residual_multiplier"),
    "unknown flag": ("llama", dict(use_parallel_residual=False), "use_parallel_residual"),
    "missing": ("llama", dict(hidden_size=None), "hidden_size"),
    "no groups": ("mistral", dict(num_key_value_heads="2"), "num_key_value_heads"),
    "text for a number": ("llama", dict(rms_norm_eps="1e-5"), "rms_norm_eps"),
    "bool for a number": ("llama", dict(num_hidden_layers=True), "num_hidden_layers"),
    "groups": ("llama", dict(num_key_value_heads=3), "num_key_value_heads"),
    "odd heads": ("llama", dict(head_dim=7), "head_dim"),
    "indivisible": ("llama", dict(hidden_size=30), "hidden_size"),
    "architecture": ("llama", dict(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    "unknown model": ("llama", dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"]), "gemma2"),
    "experts": ("llama", dict(model_type="qwen3_moe", num_experts=8), "mixture of experts"),
    "one expert": ("mixtral", dict(num_experts_per_tok=1), "num_experts_per_tok"),
    "noise": ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise"),
    "very many layers": ("llama", dict(num_hidden_layers=2**30), "num_hidden_layers"),
    "no model type": ("llama", dict(model_type=["llama"]), "model_type"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_field_that_changes_the_computation_is_refused_by_name(tmp_path, case):
    name, change, named = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON[name]))
    read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON[name] | change))
    with pytest.raises(ConfigError, match=re.escape(named)) as error:
        read_config(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_everything_that_is_wrong_stands_in_one_message():
    fields = CONFIG_JSON["llama"] | dict(hidden_act="relu", pretraining_tp=2, rope_scaling=dict(rope_type="yarn"))
    with pytest.raises(ConfigError, match=r"(?s)yarn.*relu.*pretraining_tp"):
        options_of(fields)


def test_old_and_new_names_of_rotary_fields_mean_the_same():
    scaling = dict(factor=4.0)
    old = options_of(CONFIG_JSON["llama"] | dict(rope_theta=5e5, rope_scaling=scaling | dict(type="linear")))
    new = options_of(CONFIG_JSON["llama"] | dict(rope_parameters=scaling | dict(rope_type="linear", rope_theta=500000)))
    assert old == new
    assert (old["rotary_base"], old["rotary_seq_len_interpolation_factor"]) == (5e5, 4.0)


@pytest.mark.parametrize(
    ("name", "change", "window"),
    [
        ("mistral", dict(sliding_window=4096), "4095,0"),
        ("mistral", dict(sliding_window=None), None),
        ("qwen2", dict(use_sliding_window=False, sliding_window=8), None),
        ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=2), None),
        ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=0), "7,0"),
        ("qwen3", dict(use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2), "7,0"),
    ],
)
def test_a_window_counts_the_token_itself_there_and_only_those_before_it_here(name, change, window):
    assert options_of(CONFIG_JSON[name] | change)["window_size"] == window


def test_mistral_without_a_word_of_windows_has_transformers_default():
    fields = {field: value for field, value in CONFIG_JSON["mistral"].items() if field != "sliding_window"}
    assert options_of(fields)["window_size"] == "4095,0"


def test_only_the_fields_that_changed_differ_from_the_original():
    original = CONFIG_JSON["qwen2"] | dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
        layer_types=["full_attention"] * 2,
        torch_dtype="bfloat16",
        transformers_version="4.51.0",
        _name_or_path="x",
    )
    options = options_of(original)
    assert write_config(config_of(options), original) == original
    changed = config_of(options | dict(rotary_base=1e6, hidden_dropout=0.3, attention_dropout=0.3))
    fields = write_config(changed, original, "F32")
    assert fields["rope_theta"] == 1e6
    assert fields["torch_dtype"] == "float32"
    assert fields["attention_dropout"] == 0.3
    assert "rope_parameters" not in fields
    same = original.keys() - {"rope_parameters", "torch_dtype"}
    assert {field: fields[field] for field in same} == {field: original[field] for field in same}
    assert options_of(fields) == options | dict(rotary_base=1e6, attention_dropout=0.3)


@pytest.mark.parametrize(
    "change",
    [
        dict(rotary_percent=0.5),
        dict(rotary_interleaved=True),
        dict(apply_layernorm_1p=True),
        dict(qk_layernorm=True, add_qkv_bias=True),
        dict(activation="gelu_tanh"),
        dict(mask_padded_vocab=False),
        dict(position_embedding_type="none"),
        dict(rotary_seq_len_interpolation_factor=2.0, use_rope_scaling=True),
        dict(normalization="LayerNorm"),
    ],
)
def test_a_model_that_no_config_of_theirs_describes_is_refused_and_its_option_named(change):
    config = config_of(options_of(CONFIG_JSON["llama"]) | change)
    with pytest.raises(ConfigError, match=next(iter(change)).replace("_", "[-_]")):
        write_config(config)


def test_a_mixture_of_experts_that_no_config_describes_is_compared_with_mixtral():
    change = dict(normalization="LayerNorm", activation="gelu_tanh", disable_bias_linear=False)
    config = config_of(options_of(CONFIG_JSON["mixtral"]) | change)
    with pytest.raises(
        ConfigError, match=r"(?s)got: normalization LayerNorm, activation gelu_tanh, .*MixtralForCausalLM"
    ):
        write_config(config)


def test_a_model_that_the_originals_architecture_cannot_say_is_refused():
    config = config_of(options_of(CONFIG_JSON["llama"]) | dict(add_qkv_bias=True))
    assert write_config(config)["architectures"] == ["Qwen2ForCausalLM"]
    with pytest.raises(ConfigError, match="add-qkv-bias"):
        write_config(config, CONFIG_JSON["llama"])


# ---- files that are carried along ---------------------------------------------------------------------------------
def test_plain_files_of_the_tokenizer_are_carried_along_and_neither_links_nor_code(tmp_path):
    (tmp_path / "secret").write_text("key")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "modeling_llama.py", "tokenizer.py", "notes.txt"):
        (folder / name).write_text(name)
    (folder / "vocab.json").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "merges.txt")
    (folder / "tokenizer.model").mkdir()
    taken, refused = read_companions(folder)
    assert taken == {name: name.encode() for name in ("tokenizer.json", "generation_config.json")}
    assert refused.keys() == {"vocab.json", "merges.txt", "tokenizer.model"}
    assert "link" in refused["vocab.json"]
    assert not [name for name in COMPANIONS if name.endswith(".py")]


def test_bfloat16_values_survive_fp32_and_come_back(tmp_path):
    fields = CONFIG_JSON["llama"] | dict(torch_dtype="bfloat16")
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in random_tensors(fields).items()}
    write_folder(tmp_path, fields, tensors)
    config = config_of(options_of(fields))
    export(tmp_path / "x", config, imported(tmp_path, options_of(fields)), write_config(config, fields))
    assert_equal_files(tmp_path / "x", tmp_path, "BF16")
