"""scripts/check_step.py: equal layouts pass, a wrong gradient is found and named, other models are refused."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compiled_support import program_of
from training_runs import quick_environment, train

from jmegatron.config import load_config, resolve
from jmegatron.errors import ConfigError
from jmegatron.training import compare
from jmegatron.training.compare import averaging_note, check_same_step, compare_gradients, layer_numbers, relative

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_step.py"
MODEL = """
model: {num_layers: 2, hidden_size: 16, num_attention_heads: 2, seq_length: 8, max_position_embeddings: 8,
        vocab_size: 57, make_vocab_size_divisible_by: 4, untie_embeddings_and_output_weights: true,
        hidden_dropout: 0.0, attention_dropout: 0.0}
data: {mock_data: true}
optimizer: {lr: 1e-3}
training: {micro_batch_size: 1, global_batch_size: 4, train_iters: 1}
"""
LEAF = "layers/mlp/up/kernel"


def main(*arguments):
    spec = importlib.util.spec_from_file_location("check_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(list(map(str, arguments)))


@pytest.fixture
def layouts(tmp_path):
    """Two files: tp 2 on 2 devices, pp 2 on 4; the vocabulary of 57 is padded to 64 and to 60."""
    paths = []
    for name, degree, devices in (("tp", "tensor", 2), ("pp", "pipeline", 4)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"{MODEL}parallel: {{{degree}_model_parallel_size: 2}}\n")
        paths.append((path, devices))
    (tp, tp_devices), (pp, pp_devices) = paths
    return ["--config", tp, "--devices", tp_devices, "--against", pp, "--against-devices", pp_devices]


# ---- the program ----------------------------------------------------------------------------------------------------
def test_equal_layouts_pass_as_a_command_on_virtual_devices(layouts):
    for path, devices in ((layouts[1], 2), (layouts[5], 4)):
        path.write_text(path.read_text() + f"hardware: {{num_cpu_devices: {devices}}}\n")
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "--config",
            str(layouts[1]),
            "--against",
            str(layouts[5]),
            "--normalization",
            "RMSNorm",
        ],
        capture_output=True,
        text=True,
        check=False,
        env=quick_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "tp.yaml: mesh pp 1, dp 1, ep 1, cp 1, tp 2; 4 micro-batches, float32\n" in done.stdout
    assert "pp.yaml: mesh pp 2, dp 2, ep 1, cp 1, tp 1; 2 micro-batches, float32, 1f1b\n" in done.stdout
    for word in ("loss ", "grad norm ", "output/kernel ", "embedding/word/embedding ", LEAF, "worst gradient: "):
        assert word in done.stdout
    assert done.stdout.endswith("equal within the tolerances\n")


def test_a_gradient_that_is_off_in_one_layout_is_named(layouts, monkeypatch, capsys):
    right = compare.make_gradient_function

    def make(settings, mesh):
        gradients_of = right(settings, mesh)

        def wrong(*arguments):
            report, gradients = gradients_of(*arguments)
            if mesh.shape["pp"] > 1:
                kernel = gradients["layers"]["mlp"]["up"]["kernel"]
                gradients["layers"]["mlp"]["up"]["kernel"] = kernel.at[1].multiply(1.001)
            return report, gradients

        return wrong

    monkeypatch.setattr(compare, "make_gradient_function", make)
    assert main(*layouts) == 1
    out = capsys.readouterr().out
    rows = out[out.index("worst first") :].splitlines()[1:]
    assert rows[0].startswith(LEAF + " ")
    assert "  [1, " in rows[0]  # the layer
    assert f"above tolerance: gradient of {LEAF} " in out.splitlines()[-1]
    assert " and " not in out.splitlines()[-1]


def test_weights_may_come_from_a_checkpoint(layouts, tmp_path, capsys):
    cache = ["--config", str(layouts[1]), "--eval-iters", "0"]
    train(tmp_path, "--save", str(tmp_path / "saved"), devices=2, defaults=cache)
    assert main(*layouts, "--load", tmp_path / "saved") == 0
    assert "resumed from" in capsys.readouterr().out


# ---- what it refuses ------------------------------------------------------------------------------------------------
def test_models_that_differ_are_refused_with_the_options(layouts, capsys):
    layouts[5].write_text(layouts[5].read_text().replace("num_layers: 2", "num_layers: 4, qk_layernorm: true"))
    assert main(*layouts) == 2
    err = capsys.readouterr().err
    assert "got: num_layers 2 and 4; qk_layernorm False and True\n" in err
    assert "--num-layers (model.num_layers), --qk-layernorm (model.qk_layernorm)\n" in err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--against-devices", "3"], ["pp.yaml: ", "3 devices"]),
        (["--devices", "1"], ["tp.yaml: ", "tensor_model_parallel_size 2"]),
        (["--devices", "0"], ["tp.yaml: devices of a layout: got 0, expected 1 to 8"]),
        (["--devices", "9"], ["got 9", "--num-cpu-devices 9"]),
        (["--gradient-tolerance", "-1"], ["--gradient-tolerance: got -1.0"]),
        (["--loss-tolerance", "nan"], ["--loss-tolerance: got nan"]),
        (["--num-layer", "3"], ["tp.yaml: ", "did you mean --num-layers?"]),
        (["--against", "nowhere.yaml"], ["nowhere.yaml: ", "cannot be read"]),
    ],
)
def test_wrong_options_end_with_2_and_name_the_file(layouts, capsys, extra, words):
    assert main(*layouts, *extra) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    for word in words:
        assert word in err


# ---- what has to be the same ----------------------------------------------------------------------------------------
_LINE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --lr 1e-3"
    " --train-iters 2 --micro-batch-size 2 --global-batch-size 8 --mock-data --vocab-size 61"
)
WORDS = _LINE.split()


def config_of(*options):
    return resolve(load_config([*WORDS, *options]), data_parallel_size=1)


@pytest.mark.parametrize(
    "options",
    [
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "gpipe"],
        ["--recompute-activations", "--bf16", "--micro-batch-size", "1", "--lr", "2", "--num-workers", "3"],
    ],
)
def test_layout_precision_and_optimizer_may_differ(options):
    check_same_step(config_of(), config_of(*options))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--seed", "3"], "seed 1234 and 3"),
        (["--global-batch-size", "16"], "global_batch_size 8 and 16"),
        (["--calculate-per-token-loss"], "calculate_per_token_loss False and True"),
        (["--no-mock-data", "--demo-data"], "mock_data True and False; demo_data False and True"),
        (["--no-mask-padded-vocab"], "mask_padded_vocab True and False"),
    ],
)
def test_what_decides_the_numbers_may_not(options, name):
    with pytest.raises(ConfigError, match=name):
        check_same_step(config_of(), config_of(*options))


def test_padding_counts_only_where_it_takes_part_in_the_softmax():
    tp = ["--tensor-model-parallel-size", "2"]
    check_same_step(config_of(), config_of(*tp))
    with pytest.raises(ConfigError, match="padded_vocab_size 128 and 256"):
        check_same_step(config_of("--no-mask-padded-vocab"), config_of("--no-mask-padded-vocab", *tp))


def test_unequal_masks_and_other_micro_batches_are_said_to_differ():
    small = config_of("--micro-batch-size", "1")
    equal, unequal = ({"loss_mask": np.arange(16) < np.array(counts)[:, None]} for counts in ([8, 8], [8, 9]))
    assert "micro_batch_size" in averaging_note(config_of(), small, unequal)
    for case in (
        (config_of(), small, equal),
        (config_of(), small, {}),
        (config_of(), config_of("--tensor-model-parallel-size", "2"), unequal),
        (config_of("--calculate-per-token-loss"), small, unequal),
    ):
        assert averaging_note(*case) is None


EXPERTS = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.1")


@pytest.mark.parametrize(
    ("options", "other", "expected"),
    [
        ((), ("--micro-batch-size", "1"), "seq_aux_loss"),
        (("--moe-router-load-balancing-type", "seq_aux_loss"), ("--micro-batch-size", "1"), None),
        (("--moe-aux-loss-coeff", "0"), ("--micro-batch-size", "1"), None),
        ((), ("--tensor-model-parallel-size", "2"), None),
        (("--moe-expert-capacity-factor", "1"), ("--tensor-model-parallel-size", "2"), "capacity"),
    ],
)
def test_experts_that_other_tokens_fill_or_balance_are_said_to_differ(options, other, expected):
    note = averaging_note(config_of(*EXPERTS, *options), config_of(*EXPERTS, *options, *other), {})
    assert note is None if expected is None else expected in note


# ---- the comparison -------------------------------------------------------------------------------------------------
def test_leaves_are_compared_by_their_largest_difference_over_their_largest_value():
    one = {"a": np.array([[1.0, -4.0], [2.0, 0.0]], np.float32), "b": np.zeros(3, np.float32)}
    two = {"a": np.array([[1.0, -4.0], [2.5, 0.0]], np.float32), "b": np.zeros(3, np.float32)}
    rows = compare_gradients(one, two)
    assert [(row.path, row.error, row.largest, row.place) for row in rows[:1]] == [("a", 0.125, 4.0, (1, 0))]
    assert (rows[1].path, rows[1].error) == ("b", 0.0)
    assert compare_gradients(one, {**two, "b": np.full(3, 1e-9, np.float32)})[0].path == "b"


def test_the_first_index_is_the_number_of_the_layer_where_only_some_layers_have_the_parameter():
    words = "--num-experts 4 --num-layers 4 --moe-layer-freq 2 --pipeline-model-parallel-size 2"
    layers = layer_numbers(program_of([*WORDS, *words.split()], "cpu", 2).specs)
    assert layers["layers/moe/router/kernel"] == [0, 2]
    assert layers["layers/mlp/up/kernel"] == [1, 3]
    assert "embedding/word/embedding" not in layers
    path = "layers/moe/router/kernel"
    one, two = ({path: np.array([[1.0, 1.0], [1.0, value]], np.float32)} for value in (1.0, 2.0))
    assert compare_gradients(one, two, layers)[0].place == (2, 1)


def test_what_is_not_finite_is_worse_than_anything():
    one = {"a": np.array([1.0, 9.0], np.float32), "b": np.array([1.0, np.nan], np.float32)}
    rows = compare_gradients(one, {**one, "a": np.array([-1.0, 9.0], np.float32)})
    assert (rows[0].path, rows[0].error, rows[0].place) == ("b", math.inf, (1,))
    assert relative(float("nan"), 1.0) == relative(1.0, float("inf")) == math.inf
    assert (relative(0.0, 0.0), relative(2.0, 1.0)) == (0.0, 0.5)


def test_padding_of_one_alone_is_left_out_and_other_trees_are_refused():
    one = {"embedding": np.ones((4, 2), np.float32)}
    two = {"embedding": np.concatenate([np.ones((4, 2)), np.full((2, 2), 7.0)]).astype(np.float32)}
    assert compare_gradients(one, two)[0].error == 0.0
    with pytest.raises(ValueError, match="bias"):
        compare_gradients(one, {**one, "bias": np.ones(1, np.float32)})


def test_weights_are_given_to_any_padding():
    value = np.arange(6.0).reshape(3, 2)
    assert compare._fitted(value, (2, 2)).tolist() == [[0, 1], [2, 3]]
    assert compare._fitted(value, (4, 2)).tolist() == [[0, 1], [2, 3], [4, 5], [0, 0]]
