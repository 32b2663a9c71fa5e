"""scripts/compare_reference.py: recordings are met, what is wrong is named where it is, and what it refuses.

Whether ours equals the recordings under every layout stands in golden/test_reference_layouts.py.
"""

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden.megatron_weights import DATA, from_megatron, recorded, reference_settings, unpack_checkpoints
from safetensors.numpy import load_file, save_file
from training_runs import environment

from jmegatron.interop.reference_runs import ReferenceTrajectory
from jmegatron.training import compare, compare_reference, convert
from jmegatron.training.build import gpt_settings
from jmegatron.training.compare_reference import Row, errors, leaf_rows, open_weights, step_rows, table, verdict

SCRIPT = Path(__file__).parents[3] / "scripts" / "compare_reference.py"
GPT, LLAMA = DATA / "gpt_gelu", DATA / "llama_like"
COMMON = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--max-position-embeddings", "32"]
OPTIONS = {
    GPT: [*COMMON, "--ffn-hidden-size", "256"],
    LLAMA: [
        *(*COMMON, "--group-query-attention", "--num-query-groups", "2", "--ffn-hidden-size", "160", "--swiglu"),
        *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        "--untie-embeddings-and-output-weights",
    ],
}
FC2 = "decoder.layers.2.mlp.linear_fc2.weight"


def main(*words):
    spec = importlib.util.spec_from_file_location("compare_reference_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(list(map(str, words)))


def against(folder, *words, options=None):
    return main("--reference", "recorded", folder, *(options or OPTIONS[folder]), *words)


def changed(folder: Path, to: Path, **weights) -> Path:
    """A copy of recordings of which some weights are others."""
    shutil.copytree(folder, to)
    save_file(load_file(folder / "weights.safetensors") | weights, to / "weights.safetensors")
    return to


# ---- recordings -----------------------------------------------------------------------------------------------------
def test_a_recording_is_met_in_a_pipeline_as_a_command(tmp_path):
    config = tmp_path / "model.yaml"
    config.write_text("parallel: {pipeline_model_parallel_size: 2, tensor_model_parallel_size: 2}\n")
    done = subprocess.run(
        [
            *(sys.executable, SCRIPT, "--reference", "recorded", GPT, "--config", config, "--num-cpu-devices", "4"),
            *("--mock-data", "--num-steps", "0", "--per-layer", *OPTIONS[GPT]),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "ours: mesh pp 2, dp 1, ep 1, cp 1, tp 2; 2 micro-batches, float32\n" in done.stdout
    assert "layer by layer without the pipeline" in done.stdout
    for word in (
        "\nlayer 3 mlp ",
        "\nfinal norm ",
        "\nlogits ",
        "\ntoken losses ",
        "\nloss ",
        "worst of the gradients: ",
    ):
        assert word in done.stdout
    assert "and 52 more, none of them worse, none above tolerance" in done.stdout
    assert done.stdout.endswith("equal within the tolerances\n")


def test_steps_of_another_optimizer_are_found_where_they_part(capsys):
    """The first step has learning rate 0, so that the weights are others after the second one."""
    optimizer = ["--lr", "2e-3", "--min-lr", "2e-4", "--lr-warmup-iters", "4", "--lr-decay-iters", "20"]
    optimizer += [
        "--lr-decay-style",
        "cosine",
        "--weight-decay",
        "0.1",
        "--adam-beta1",
        "0.8",
        "--micro-batch-size",
        "2",
    ]
    assert against(LLAMA, "--num-steps", "4", "--all", "--train-iters", "20", *optimizer) == 1
    out = capsys.readouterr().out
    lines = {line[:44].strip(): line for line in out.splitlines()}
    for name in ("logits", "layers/mlp/down/kernel[3]", "step 1 loss", "step 2 loss", "step 4 lr"):
        assert "ABOVE" not in lines[name]
    assert "ABOVE" in lines["step 3 loss"]
    assert out.splitlines()[-1].startswith("above tolerance: step 3 loss ")
    assert len([name for name in lines if name.startswith("layers/")]) == 8 * 4 - 4  # 7 leaves a layer


@pytest.mark.parametrize(
    ("folder", "words", "where"),
    [
        (LLAMA, ["--rotary-base", "20000"], "layer 0 attention"),
        (GPT, ["--activation", "gelu_erf"], "layer 0 mlp"),
    ],
)
def test_a_wrong_option_is_named_at_the_first_part_that_has_it(capsys, folder, words, where):
    assert against(folder, "--per-layer", "--forward-only", *words) == 1
    assert f"\nfirst activation above tolerance: {where}, " in capsys.readouterr().out


def test_a_weight_that_differs_in_one_layer_is_named_there(tmp_path, capsys):
    weight = recorded("gpt_gelu", "weights")[FC2].copy()
    weight[3, 5] *= 1.01
    folder = changed(GPT, tmp_path / "gpt_gelu", **{FC2: weight})
    assert against(folder, "--per-layer", "--forward-only", options=OPTIONS[GPT]) == 1
    out = capsys.readouterr().out
    assert "\nfirst activation above tolerance: layer 2 mlp, " in out
    assert "gradients" not in out


def test_a_layer_that_the_user_changed_is_named_by_its_output(monkeypatch, capsys):
    """Attention and MLP are right: what is wrong is how the layer puts them together."""
    right = compare_reference.gpt_layer

    def wrong(parameters, x, context, layer, settings, parallel, *rest):
        y = right(parameters, x, context, layer, settings, parallel, *rest)
        return y + 1e-3 * (layer == 1) * x

    monkeypatch.setattr(compare_reference, "gpt_layer", wrong)
    assert against(LLAMA, "--per-layer", "--forward-only") == 1
    assert "\nfirst activation above tolerance: layer 1 output, " in capsys.readouterr().out


def test_a_gradient_that_is_wrong_is_named_first_with_its_layer(monkeypatch, capsys):
    right = compare.make_gradient_function

    def make(settings, mesh):
        gradients_of = right(settings, mesh)

        def wrong(*arguments):
            report, gradients = gradients_of(*arguments)
            kernel = gradients["layers"]["mlp"]["up"]["kernel"]
            gradients["layers"]["mlp"]["up"]["kernel"] = kernel.at[1].multiply(1.001)
            return report, gradients

        return wrong

    monkeypatch.setattr(compare, "make_gradient_function", make)
    assert against(LLAMA, "--num-steps", "0") == 1
    out = capsys.readouterr().out
    assert "\nworst of the gradients: layers/mlp/up/kernel[1], 1.00e-03\n" in out
    assert "above tolerance: layers/mlp/up/kernel[1] 1.00e-03 (0.0001)\n" in out
    assert "decoder.layers.1.mlp.linear_fc1.weight" in out


# ---- weights --------------------------------------------------------------------------------------------------------
def test_weights_of_every_format_are_read_to_the_last_bit(tmp_path):
    unpack_checkpoints("gpt_gelu", tmp_path)
    source = next(tmp_path.rglob("*tp2"))
    expected = from_megatron(recorded("gpt_gelu", "weights"), reference_settings("gpt_gelu"))
    options = ["--max-position-embeddings", "32", "--num-attention-heads", "4", "--seq-length", "32"]
    lines: list[str] = []
    convert.import_megatron(str(source), str(tmp_path / "ours"), options, False, lines.append)
    convert.export_huggingface(
        convert.find(str(tmp_path / "ours"), None, lines.append), str(tmp_path / "hf"), None, None, lines.append
    )
    config = convert.saved_config(convert.find(str(tmp_path / "ours"), None, lines.append))
    for folder in (source, tmp_path / "ours", tmp_path / "hf"):
        weights = open_weights(str(folder), None, lines.append)
        assert weights.options["num_layers"] == 4
        found = weights.read(config, gpt_settings(config, "cpu"))
        assert found.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_array_equal(found[path], value, err_msg=f"{folder}: {path}")


# ---- what it refuses ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["recorded"], "--reference recorded: got 0 folders, expected one"),
        (["recorded", "nowhere", *OPTIONS[GPT]], "nowhere: got no weights.safetensors and forward.npz"),
        (["onnx"], "--reference: got 'onnx', expected recorded DIR, transformers or megatron"),
        (["transformers"], "--hf-folder: is needed with --reference transformers"),
        (["recorded", GPT, "--hf-folder", "x"], "--hf-folder: has no meaning with --reference recorded"),
        (["recorded", GPT, *OPTIONS[LLAMA]], "decoder.layers.0.input_layernorm.bias is [64], expected none"),
        (["recorded", GPT, *OPTIONS[GPT], "--vocab-size", "120"], "fix: --vocab-size 128"),
        (["recorded", GPT, *OPTIONS[GPT], "--devices", "9"], "--devices: got 9, expected 1 to 8"),
        (["recorded", GPT, *OPTIONS[GPT], "--devices", "4"], "4 data-parallel ranks for 2 sequences"),
        (["recorded", "nowhere", "--loss-tolerance", "-1"], "--loss-tolerance: got -1.0, expected at least 0"),
        (["recorded", "nowhere", "--weights-tolerance", "nan"], "--weights-tolerance: got nan, expected at least 0"),
        (["recorded", "nowhere", "--logits-tolerance", "inf"], "--logits-tolerance: got inf, expected at least 0"),
        (["recorded", GPT, *OPTIONS[GPT], "--weights", "nowhere"], "nowhere"),
        (["recorded", GPT, "--num-sequences", "4"], "--num-sequences: has no meaning here: the recorded batch"),
        (["recorded", GPT, "--num-steps", "-1"], "--num-steps: got -1, expected at least 0"),
        (["recorded", GPT, "--num-steps", "2", "--forward-only"], "--num-steps: has no meaning here"),
        (
            ["recorded", GPT, *OPTIONS[GPT], "--num-steps", "21"],
            "--num-steps: got 21, expected at most the 20 recorded",
        ),
        (["recorded", GPT, "--num-layer", "2"], "did you mean --num-layers?"),
    ],
)
def test_what_cannot_be_compared_is_one_message_and_status_2(capsys, words, expected):
    assert main("--reference", *words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert expected in captured.err
    assert "fix: " in captured.err or "did you mean" in captured.err


def replace(file, **arrays):
    np.savez(file, **{**np.load(file), **arrays})


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: (f / "forward.npz").write_bytes(b"PK\x03\x04"), "forward.npz: cannot be read"),
        (lambda f: np.savez(f / "forward.npz", logits=np.zeros(3)), "got batch/tokens missing"),
        (lambda f: (f / "weights.safetensors").write_bytes(b"\xff" * 64), "weights.safetensors"),
        (lambda f: np.savez(f / "trajectory.npz", loss=np.zeros(3)), "trajectory.npz: got loss [3]; expected"),
        (lambda f: replace(f / "trajectory.npz", lr_used=np.zeros(3)), "lr_used [3]; expected"),
        (lambda f: replace(f / "trajectory.npz", tokens=np.full((20, 8, 33), 128)), "128 to 128, expected 0 to 127"),
        (
            lambda f: replace(f / "forward.npz", **{"act/layer_1_out": np.zeros(3)}),
            "act/layer_1_out: got [3], expected",
        ),
        (lambda f: (f / "config.json").write_text('{"optimizer": 3}'), "config.json of the recorded steps"),
        (
            lambda f: (f / "config.json").write_text('{"optimizer": {"lr": "fast"}}'),
            "lr: got 'fast', expected a number",
        ),
        (
            lambda f: (f / "config.json").write_text('{"optimizer": {"decay_steps": 2.5}}'),
            "decay_steps: got 2.5, expected a whole number",
        ),
        (
            lambda f: (f / "config.json").write_text('{"optimizer": {"lr": 1}, "micro_batch": "2"}'),
            "micro_batch: got '2', expected a whole number",
        ),
        (lambda f: replace(f / "forward.npz", loss=np.zeros(3)), "loss: got [3], expected one number"),
        (lambda f: replace(f / "forward.npz", loss=np.array("low")), "loss: got values of <U3, expected numbers"),
        (lambda f: replace(f / "forward.npz", **{"batch/tokens": np.full((2, 32), "a")}), "batch/tokens: got values"),
        (
            lambda f: replace(f / "forward.npz", **{"batch/tokens": np.full((2, 32), 0.5)}),
            "batch/tokens: got values of float64, expected whole numbers",
        ),
        (
            lambda f: replace(f / "forward.npz", **{"batch/labels": np.full((2, 32), 2**32 + 5)}),
            "expected 0 to 127",
        ),
        (lambda f: replace(f / "forward.npz", **{"batch/loss_mask": np.full((2, 32), "1")}), "batch/loss_mask: got"),
        (
            lambda f: replace(f / "forward.npz", **{"act/layer_1_out": np.full((32, 2, 64), "a")}),
            "act/layer_1_out: got values of <U1, expected numbers",
        ),
        (
            lambda f: replace(f / "trajectory.npz", tokens=np.full((20, 8, 33), 1.5)),
            "trajectory.npz: tokens: got values of float64, expected whole numbers",
        ),
        (lambda f: replace(f / "trajectory.npz", loss=np.full(20, "low")), "loss: got values of <U3, expected numbers"),
    ],
)
def test_damaged_recordings_are_one_message_and_status_2(tmp_path, capsys, damage, expected, monkeypatch):
    folder = tmp_path / "gpt_gelu"
    shutil.copytree(GPT, folder)
    damage(folder)
    monkeypatch.setattr(compare_reference.Comparison, "_forward_rows", lambda *_: [])
    monkeypatch.setattr(compare_reference.Comparison, "_gradient_rows", lambda *_: [])
    assert against(folder, options=OPTIONS[GPT]) == 2
    assert expected in capsys.readouterr().err


def only(tmp_path: Path, kept) -> Path:
    """A copy of recordings of whose forward.npz there is only what `kept` says of its name."""
    folder = tmp_path / "gpt_gelu"
    shutil.copytree(GPT, folder)
    np.savez(folder / "forward.npz", **{n: value for n, value in recorded("gpt_gelu", "forward").items() if kept(n)})
    return folder


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (lambda name: not name.startswith("act/"), "--per-layer: got no activations in "),
        (lambda name: name != "act/layer_1_attn_out", "--per-layer: got no layer 1 attention in "),
        (lambda name: not name.startswith("act/layer_3"), "got no layer 3 attention, layer 3 mlp, layer 3 output in "),
        (lambda name: not name.endswith("_mlp_out"), "got no layer 0 mlp, layer 1 mlp, layer 2 mlp, layer 3 mlp in "),
    ],
)
def test_layers_that_were_not_recorded_are_refused_by_name(tmp_path, capsys, kept, expected):
    assert against(only(tmp_path, kept), "--per-layer", options=OPTIONS[GPT]) == 2
    assert expected in capsys.readouterr().err


def test_a_recording_of_nothing_but_tokens_is_not_called_equal(tmp_path, capsys):
    folder = only(tmp_path, lambda name: name.startswith("batch/"))
    assert against(folder, "--forward-only", options=OPTIONS[GPT]) == 2
    captured = capsys.readouterr()
    assert "equal" not in captured.out
    assert "nothing to compare: got none of it in " in captured.err
    assert "expected logits, token_loss, loss or (without --forward-only) gradients; fix: " in captured.err


def test_what_was_not_recorded_is_said(tmp_path, capsys, monkeypatch):
    folder = only(tmp_path, lambda name: name.startswith("batch/"))
    (folder / "trajectory.npz").unlink()
    monkeypatch.setattr(
        compare_reference.Comparison, "_gradient_rows", lambda *_: [Row("gradients", "leaf", 0.0, 0.0, 1.0)]
    )
    assert against(folder, options=OPTIONS[GPT]) == 0
    assert "\nnot compared: logits, token losses, loss, optimizer steps\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "package", "how"),
    [
        (["transformers", "--hf-folder", "x"], "transformers", "pip install jmegatron[hf]"),
        (["megatron", *COMMON], "megatron.core", "pip install --no-deps megatron-core"),
    ],
)
def test_a_reference_that_is_not_installed_is_one_line(capsys, monkeypatch, words, package, how):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in (package, "torch") else find(name, *a)
    )
    assert main("--reference", *words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert how in err


# ---- the table ------------------------------------------------------------------------------------------------------
def test_errors_are_relative_to_the_references_largest_value():
    ours, theirs = np.array([[1.0, -4.0], [2.5, 0.0]]), np.array([[1.0, -5.0], [2.0, 0.0]])
    assert errors(ours, theirs) == (0.2, 0.075, (0, 1))
    assert errors(ours, theirs, absolute=True) == (1.0, 0.375, (0, 1))
    assert errors(ours, theirs, absolute=True, spare=0.25) == (0.5, 0.375, (0, 1))
    assert errors(ours[:1, :1], theirs[:1, :1] + 1, absolute=True, spare=0.5)[0] == 1.0  # one counts at least
    assert errors(np.zeros(2), np.zeros(2)) == (0.0, 0.0, (0,))
    assert errors(np.array([3.0]), np.zeros(1))[0] == 3.0
    assert errors(np.array([1.0, np.nan]), np.ones(2)) == (math.inf, math.inf, (1,))
    assert errors(np.ones(2), np.array([np.inf, 1.0]))[:2] == (math.inf, math.inf)
    with pytest.raises(ValueError, match="got"):
        errors(np.ones(2), np.ones(3))


def test_leaves_are_split_by_layer_and_the_worst_comes_first():
    ours = {"final_norm/scale": np.array([1.0, 2.0]), "layers/a/kernel": np.array([[1.0, 1.0], [1.0, 1.5]])}
    theirs = {"final_norm/scale": np.array([1.0, 1.0]), "layers/a/kernel": np.ones((2, 2))}
    rows = leaf_rows("gradients", ours, theirs, {"layers/a/kernel[1]": "theirs.1.weight"}, 0.6)
    assert [(row.name, row.error, row.above) for row in rows] == [
        ("final_norm/scale", 1.0, True),
        ("layers/a/kernel[1]", 0.5, False),
        ("layers/a/kernel[0]", 0.0, False),
    ]
    assert rows[1].note == "theirs.1.weight at [1]"


def test_the_table_says_what_it_leaves_out_and_the_verdict_what_is_above():
    rows = [Row("activations", "layer 0 mlp", 1e-7, 1e-8, 1e-5), Row("activations", "layer 1 mlp", 1e-3, 1e-4, 1e-5)]
    rows += [Row("gradients", f"leaf {n}", 1e-3 / (n + 1), 1e-5, 1e-4) for n in range(12)]
    text = "\n".join(table(rows))
    assert "... and 4 more, none of them worse, 1 above tolerance (--all)" in text
    assert "layer 1 mlp" in text
    assert "leaf 11" not in text
    assert "leaf 11" in "\n".join(table(rows, show_all=True))
    lines = verdict(rows)
    assert "worst of the gradients: leaf 0, 1.00e-03" in lines
    assert "first activation above tolerance: layer 1 mlp, 1.00e-03" in lines
    assert lines[-1].startswith("above tolerance: layer 1 mlp 1.00e-03 (1e-05); leaf 0 ")
    assert lines[-1].endswith(" and 6 more")
    assert verdict(rows[:1])[-1] == "equal within the tolerances"
    assert verdict([Row("forward", "loss", math.nan, 0.0, 1.0)])[-1].startswith("above tolerance: loss nan")


def test_steps_have_a_row_for_loss_norm_and_rate_each():
    one = ReferenceTrajectory(np.array([2.0, 1.0]), np.array([1.0, 1.0]), np.array([0.0, 0.1]), {})
    two = ReferenceTrajectory(np.array([2.0, 2.0]), np.array([1.0, 1.0]), np.array([0.0, 0.1]), {})
    rows = step_rows(one, two, compare_reference.TOLERANCES)
    assert [row.name for row in rows if row.above] == ["step 2 loss"]
    assert [row.error for row in rows] == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]


# ---- the other frameworks -------------------------------------------------------------------------------------------
LLAMA_FIELDS = dict(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    initializer_range=0.1,
)
GPT2_FIELDS = dict(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=16, initializer_range=0.1)


@pytest.fixture
def hf_folder(tmp_path):
    """(name of a family, its fields) -> a folder with a random model of it."""
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def make(family, fields):
        torch.manual_seed(0)
        ids = dict(bos_token_id=0, eos_token_id=0)
        head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
        config = getattr(transformers, f"{family}Config")(**fields, **ids)
        model = getattr(transformers, family + head)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


@pytest.mark.interop_torch
@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("Llama", LLAMA_FIELDS, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
        ("GPT2", GPT2_FIELDS, ["--context-parallel-size", "2"]),
    ],
)
def test_transformers_is_met_by_layers_gradients_and_steps(hf_folder, capsys, family, fields, words):
    folder = hf_folder(family, fields)
    words = ["--reference", "transformers", "--hf-folder", folder, "--num-steps", "3", "--per-layer", *words]
    status = main(*words, "--lr", "1e-2", "--weight-decay", "0.1")
    out = capsys.readouterr().out
    assert status == 0, out
    for word in ("reference: transformers ", "\nlayer 1 mlp ", "\nstep 3 grad norm ", "worst of the weights: "):
        assert word in out


@pytest.mark.interop_torch
def test_an_option_that_is_not_transformers_is_named_at_its_layer(hf_folder, capsys):
    folder = hf_folder("Llama", LLAMA_FIELDS)
    words = ["--reference", "transformers", "--hf-folder", folder, "--per-layer", "--forward-only"]
    assert main(*words, "--norm-epsilon", "1e-3") == 1
    assert "\nfirst activation above tolerance: layer 0 attention, " in capsys.readouterr().out


@pytest.mark.interop_torch
def test_a_folder_that_transformers_cannot_load_is_one_message(hf_folder, capsys):
    folder = hf_folder("Llama", LLAMA_FIELDS)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"intermediate_size": 40}))
    assert main("--reference", "transformers", "--hf-folder", folder) == 2
    assert "mlp.down_proj.weight" in capsys.readouterr().err


@pytest.mark.interop_torch
def test_megatron_core_is_met_by_layers_gradients_and_steps(tmp_path):
    """In a process of its own: Megatron-Core leaves process groups behind."""
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("einops", reason="needs einops")
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core")
    words = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2"
    words += " --seq-length 16 --vocab-size 67 --swiglu --normalization RMSNorm --position-embedding-type rope"
    words += " --disable-bias-linear --add-qkv-bias --qk-layernorm --init-method-std 0.1 --per-layer --num-steps 3"
    words += " --lr 1e-2 --lr-warmup-iters 1 --train-iters 5 --lr-decay-style cosine --weight-decay 0.1"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--reference", "megatron", *words.split()],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    for word in ("reference: Megatron-Core ", "\nlayer 1 mlp ", "\nstep 3 grad norm ", "worst of the weights: "):
        assert word in done.stdout
