"""scripts/convert_checkpoint.py: whole folders in and out, what it refuses, and that runs go on from what it writes."""

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden.megatron_weights import from_megatron, recorded, reference_settings, unpack_checkpoints
from safetensors.numpy import load_file, save_file
from training_runs import ROOT, environment, saved_arrays, train

from jmegatron.checkpoint.streaming import StreamingReader, StreamingWriter
from jmegatron.config import load_config

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_checkpoint.py"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
TRAIN = [
    *("--mock-data", "--eval-iters", "0", "--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-3"),
    *("--log-interval", "1"),
]


@pytest.fixture(scope="module")
def convert():
    spec = importlib.util.spec_from_file_location("convert_checkpoint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *words: module.main([str(word) for word in words])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder of Hugging Face, written by the safetensors package."""
    rng, folder = np.random.default_rng(0), tmp_path / "llama"
    folder.mkdir()
    shapes = {"model.embed_tokens.weight": (67, 32), "model.norm.weight": (32,), "lm_head.weight": (67, 32)}
    for layer in range(2):
        for name, shape in {
            "input_layernorm": (32,),
            "post_attention_layernorm": (32,),
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "mlp.gate_proj": (48, 32),
            "mlp.up_proj": (48, 32),
            "mlp.down_proj": (32, 48),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    save_file({n: rng.normal(0, 0.1, s).astype(np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


def test_hugging_face_in_and_out_gives_every_tensor_field_and_tokenizer_back(convert, llama, tmp_path, capsys):
    assert convert("--from", "hf", "--to", "jmegatron", "--input", llama, "--output", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    tensors = load_file(llama / "model.safetensors")
    assert f"theirs: {len(tensors)} tensors, each used once" in said
    assert all(sum(name in line.split(" -> ")[0].split(", ") for line in said.splitlines()) == 1 for name in tensors)
    assert (
        convert("--from", "jmegatron", "--to", "hf", "--input", tmp_path / "ours", "--output", tmp_path / "back") == 0
    )
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == LLAMA
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"a": 1}'


def test_training_starts_from_what_was_imported_on_any_mesh_with_the_model_file_alone(convert, llama, tmp_path):
    ours = tmp_path / "ours"
    assert convert("--from", "hf", "--to", "jmegatron", "--input", llama, "--output", ours, "--quiet") == 0
    options = ["--config", str(ours / "model.yaml"), *TRAIN, "--seq-length", "32", "--train-iters", "2"]
    options += ["--load", str(ours), "--finetune"]
    one = train(tmp_path, *options, devices=1, defaults=[])
    two = train(tmp_path, *options, "--tensor-model-parallel-size", "2", devices=2, defaults=[])
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-5)
    fresh = train(tmp_path, *options[:-3], devices=1, defaults=[])
    assert abs(fresh.losses[0] - one.losses[0]) > 1e-4  # the weights do count
    assert "changed since" not in one.out


@pytest.mark.parametrize("damage", ["missing", "extra", "misshapen", "architecture", "rope"])
def test_what_does_not_fit_is_one_message_with_status_2_and_nothing_written(damage, convert, llama, tmp_path, capsys):
    tensors = load_file(llama / "model.safetensors")
    fields = dict(LLAMA)
    if damage == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    if damage == "extra":
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    if damage == "misshapen":
        tensors["model.norm.weight"] = np.zeros((31,), np.float32)
    if damage == "architecture":
        fields["architectures"] = ["FalconForCausalLM"]
        fields["model_type"] = "falcon"
    if damage == "rope":
        fields["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0}
    save_file(tensors, llama / "model.safetensors")
    (llama / "config.json").write_text(json.dumps(fields))
    assert convert("--from", "hf", "--to", "jmegatron", "--input", llama, "--output", tmp_path / "ours") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    named = {"missing": "up_proj", "extra": "layers.2.mlp", "misshapen": "model.norm", "architecture": "Falcon"}
    assert named.get(damage, "yarn") in error
    assert not (tmp_path / "ours").exists()


def test_nothing_is_overwritten_and_options_that_mean_nothing_are_refused(convert, llama, tmp_path, capsys):
    line = ("--from", "hf", "--to", "jmegatron", "--input", llama, "--output", tmp_path / "ours", "--quiet")
    assert convert(*line) == 0
    before = (tmp_path / "ours" / "0" / "manifest.json").read_bytes()
    assert convert(*line) == 2
    assert "already there" in capsys.readouterr().err
    assert (tmp_path / "ours" / "0" / "manifest.json").read_bytes() == before
    assert convert(*line, "--optimizer") == 2
    assert "--optimizer: has no meaning from hf to jmegatron" in capsys.readouterr().err
    assert convert("--from", "hf", "--to", "megatron", "--input", llama, "--output", tmp_path / "x") == 2
    assert "expected jmegatron to be one of the two" in capsys.readouterr().err
    assert convert(*line[:-2], tmp_path / "other", "--", "--hidden-size", "64") == 2
    assert "--hidden-size: got 64, expected 32" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


# ---- Megatron-Core --------------------------------------------------------------------------------------------------
GELU = ["--activation", "gelu_tanh"]


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2"])
def test_recorded_weights_of_megatron_core_are_bit_equal_whatever_they_were_saved_at(layout, convert, tmp_path):
    unpack_checkpoints("gpt_gelu", tmp_path)
    (folder,) = tmp_path.glob(f"**/gpt_gelu_{layout}")
    assert (
        convert(
            *("--from", "megatron", "--to", "jmegatron", "--input", folder, "--output", tmp_path / "ours", "--quiet"),
            *("--", *GELU),
        )
        == 0
    )
    expected = from_megatron(recorded("gpt_gelu", "weights"), reference_settings("gpt_gelu"))
    got = saved_arrays(tmp_path / "ours", 0)
    assert {name for name in got if name != "step"} == {f"parameters/{path}" for path in expected}
    for path, value in expected.items():
        np.testing.assert_array_equal(got[f"parameters/{path}"], value, err_msg=path)
    assert load_config(
        ["--config", str(tmp_path / "ours" / "model.yaml"), *TRAIN, "--seq-length", "32", "--train-iters", "1"]
    )


# ---- what goes wrong on the way -------------------------------------------------------------------------------------
def imported(convert, source: Path, output: Path) -> int:
    return convert("--from", "hf", "--to", "jmegatron", "--input", source, "--output", output, "--quiet")


def exported(convert, source: Path, output: Path, *words: str) -> int:
    return convert("--from", "jmegatron", "--to", "hf", "--input", source, "--output", output, "--quiet", *words)


def assert_same_steps(got: Path, expected: Path) -> None:
    found, wanted = saved_arrays(got, 0), saved_arrays(expected, 0)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def change(folder: Path, name: str, value: float) -> None:
    """Writes a folder anew with one number of a tensor changed."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].flat[3] = value
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_no_finite_numbers_are_one_message_and_nothing_is_left(
    value, convert, llama, tmp_path, capsys
):
    change(llama, "model.layers.1.mlp.up_proj.weight", value)
    assert imported(convert, llama, tmp_path / "ours") == 2
    error = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj.weight" in error
    assert "1 of 1536 values" in error
    assert not (tmp_path / "ours").exists()


def test_what_cannot_be_exported_leaves_nothing_either(convert, llama, tmp_path, capsys, monkeypatch):
    change(llama, "model.norm.weight", 1e5)
    assert imported(convert, llama, tmp_path / "ours") == 0
    assert exported(convert, tmp_path / "ours", tmp_path / "back", "--dtype", "fp16") == 2
    assert "expected: at most 65504" in capsys.readouterr().err
    read = StreamingReader.read
    monkeypatch.setattr(StreamingReader, "read", lambda self, *place: read(self, *place) * np.float32(np.nan))
    assert exported(convert, tmp_path / "ours", tmp_path / "back") == 2
    assert "tensor model.embed_tokens.weight" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "ours"]


@pytest.mark.parametrize("there", ["model.yaml", "huggingface/config.json", "7/manifest.json"])
def test_an_output_that_holds_something_else_is_left_alone(there, convert, llama, tmp_path, capsys):
    path = tmp_path / "ours" / there
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert imported(convert, llama, tmp_path / "ours") == 2
    assert ("already there" if "7" not in there else "holds step 7") in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert [p for p in (tmp_path / "ours").rglob("*") if p.is_file()] == [path]
    assert imported(convert, llama, llama) == 2
    assert "expected another folder than --input" in capsys.readouterr().err


KILLED = """
import builtins, os, signal, sys
sys.path[:0] = sys.argv[1:3]
import convert_checkpoint
lines = []
def tell(line, *args, **options):
    lines.append(line)
    if len(lines) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
builtins.print = tell
convert_checkpoint.main(sys.argv[3:])
"""


def killed(*words: object) -> None:
    """Converts in a process that is killed before its ninth tensor."""
    line = [sys.executable, "-c", KILLED, str(SCRIPT.parent), str(ROOT), *map(str, words)]
    assert subprocess.run(line, env=environment(), timeout=120, check=False).returncode == -signal.SIGKILL


def test_a_conversion_killed_with_signal_9_goes_on_and_ends_with_the_same_bits(convert, llama, tmp_path, capsys):
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert imported(convert, llama, tmp_path / "whole") == 0
    killed("--from", "hf", "--to", "jmegatron", "--input", llama, "--output", ours)
    assert [path.name for path in ours.iterdir()] == ["0.tmp"]
    assert exported(convert, ours, back) == 2  # there is no step yet
    assert imported(convert, llama, ours) == 0
    assert_same_steps(ours, tmp_path / "whole")
    killed("--from", "jmegatron", "--to", "hf", "--input", ours, "--output", back)
    assert (tmp_path / "back.tmp").is_dir()
    assert exported(convert, ours, back) == 0
    assert sorted(path.name for path in back.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert load_file(back / "model.safetensors").keys() == load_file(llama / "model.safetensors").keys()


def test_nothing_of_an_interrupted_conversion_stays_if_the_source_has_changed(convert, llama, tmp_path, monkeypatch):
    write = StreamingWriter.write

    def interrupted(self, name, *given):
        write(self, name, *given)
        if "mlp/up" in name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StreamingWriter, "write", interrupted)
        assert imported(convert, llama, tmp_path / "ours") == 130
    change(llama, "model.embed_tokens.weight", 3.0)  # another download
    assert imported(convert, llama, tmp_path / "ours") == 0
    assert saved_arrays(tmp_path / "ours", 0)["parameters/embedding/word/embedding"].flat[3] == 3.0


def test_a_disk_that_is_full_at_any_point_is_one_message_and_the_next_try_goes_on(
    convert, llama, tmp_path, capsys, monkeypatch
):
    assert imported(convert, llama, tmp_path / "whole") == 0
    fsync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    for limit in (1, 2, 3, 9, 20, 22, 24):
        ours = tmp_path / f"ours{limit}"
        calls.clear()
        monkeypatch.setattr(os, "fsync", full)
        capsys.readouterr()
        assert imported(convert, llama, ours) == 2, limit
        assert capsys.readouterr().err.count("No space left") == 1
        monkeypatch.setattr(os, "fsync", fsync)
        assert imported(convert, llama, ours) == 0, capsys.readouterr().err
        assert_same_steps(ours, tmp_path / "whole")
