"""Mistakes of a user: exit status 2 and one message that says what, where, got, expected and fix; no traceback.

Most go through `main` in this process, which has eight devices; some through a real process.
"""

import builtins
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from training_runs import OPTIONS, ROOT, command, quick_environment, saved_arrays, train, train_process, write_corpus

from jmegatron.checkpoint import reader
from jmegatron.checkpoint.writer import CheckpointWriter

sys.path.insert(0, str(ROOT))
import train as program

sys.path.pop(0)

NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
CORPUS_MODEL = ("--no-mock-data", "--vocab-size", "257", "--padded-vocab-size", "264", "--global-batch-size", "8")


@pytest.fixture
def fails(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs main and returns its message, after checking the form that all of them have."""

    def run(*options: str, before_compiling: bool = True) -> str:
        cache = ["--compilation-cache-dir", str(jax.config.jax_compilation_cache_dir)]
        try:
            status = program.main([*OPTIONS, *cache, *options])
        except SystemExit as leave:
            status = int(leave.code or 0)
        captured = capsys.readouterr()
        assert status == 2
        assert captured.err.startswith("train.py: error: ")
        assert "fix:" in captured.err or "; use " in captured.err
        assert "Traceback" not in captured.err
        assert not before_compiling or "compiling" not in captured.out
        return captured.err

    return run


# ---- divisibility ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("--global-batch-size 12", "global_batch_size 12, micro_batch_size 1, data-parallel size 8"),
        ("--micro-batch-size 3", "global_batch_size 8, micro_batch_size 3"),
        ("--num-attention-heads 3 --kv-channels 8", "num_attention_heads 3, tensor_model_parallel_size 2"),
        ("--num-attention-heads 12 --kv-channels 8 --group-query-attention --num-query-groups 3", "num_query_groups 3"),
        ("--ffn-hidden-size 33", "ffn_hidden_size 33, tensor_model_parallel_size 2"),
        ("--seq-length 15 --sequence-parallel", "seq_length 15, tensor_model_parallel_size 2"),
        ("--padded-vocab-size 63", "padded_vocab_size 63, tensor_model_parallel_size 2"),
        ("--tensor-model-parallel-size 3 --num-attention-heads 3 --kv-channels 8 --ffn-hidden-size 33"
         " --padded-vocab-size 66", "8 devices; tensor_model_parallel_size 3, product 3"),
        ("--num-cpu-devices 5 --ffn-hidden-size 64", "5 devices; tensor_model_parallel_size 2"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_named(options: str, names: str, fails: Any) -> None:
    tp = [] if "data-parallel" in names or "micro_batch_size 3" in names else ["--tensor-model-parallel-size", "2"]
    message = fails(*tp, *options.split())
    assert names in message
    assert "expected:" in message
    assert "where:" in message


def test_a_huge_number_of_virtual_devices_stops_before_they_are_made(fails: Any) -> None:
    """One hundred thousand of them once took minutes and all of the memory."""
    message = fails("--num-cpu-devices", "100000", "--global-batch-size", "100000")
    assert "hardware.num_cpu_devices" in message
    assert "at most 512" in message


def test_fused_attention_on_a_cpu_is_refused(fails: Any) -> None:
    message = fails("--attention-backend", "fused")
    assert "hardware.attention_backend" in message


# ---- data -----------------------------------------------------------------------------------------------------------
def test_missing_data_are_named(fails: Any, tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in fails(*CORPUS_MODEL, "--data-path", str(tmp_path / "nothing"))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("damage", ["cut", "emptied", "foreign"])
def test_damaged_data_are_named(fails: Any, tmp_path: Path, suffix: str, damage: str) -> None:
    prefix = write_corpus(tmp_path / "corpus")
    path = Path(prefix + suffix)
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2 + 1], "emptied": b"", "foreign": b"no corpus"}[damage])
    assert str(path) in fails(*CORPUS_MODEL, "--data-path", prefix)


def test_tokens_outside_the_vocabulary_are_named(fails: Any, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", vocab=300)
    message = fails(*CORPUS_MODEL, "--data-path", prefix, before_compiling=False)
    assert "corpus.bin holds token id " in message
    assert "expected 0 .. 256" in message


def test_a_split_without_training_documents_is_named(fails: Any, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", documents=3)
    assert "--split leaves the train part 0 of the 3 sequences" in fails(
        *CORPUS_MODEL, "--data-path", prefix, "--split", "1,999,0"
    )


# ---- places that cannot be written ----------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["file", "proc"])
@pytest.mark.parametrize("option", ["save", "metrics-file", "tensorboard-dir", "profile-dir", "compilation-cache-dir"])
def test_a_place_that_cannot_be_written_is_named(option: str, place: str, fails: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = {"file": str(tmp_path / "file" / "below"), "proc": "/proc/nowhere/below"}[place]
    message = fails(f"--{option}", path, *(["--profile"] if option == "profile-dir" else []))
    assert f"--{option} {path}: cannot be written (" in message


def test_a_folder_is_no_metrics_file(fails: Any, tmp_path: Path) -> None:
    assert "Is a directory" in fails("--metrics-file", str(tmp_path))


def test_wandb_that_is_missing_says_how_to_install_it(fails: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_wandb(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "wandb":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    assert "pip install 'jmegatron[wandb]'" in fails("--wandb-project", "mine")


# ---- checkpoints ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of step 1 on eight devices."""
    folder = tmp_path_factory.mktemp("saved")
    train(folder, *NO_DROPOUT, "--exit-interval", "1", "--save", str(folder / "save"), devices=8)
    return folder / "save"


@pytest.mark.parametrize(
    ("options", "key", "fix"),
    [
        ("--num-layers 3", "model.num_layers is 3, but the checkpoint was saved with 2", "--num-layers 2"),
        ("--normalization RMSNorm", "model.normalization is RMSNorm", "--normalization LayerNorm"),
        ("--untie-embeddings-and-output-weights", "model.untie_embeddings_and_output_weights is True", "--no-untie-"),
        ("--no-mask-padded-vocab", "model.mask_padded_vocab is False", "--mask-padded-vocab"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_key(options: str, key: str, fix: str, saved: Path, fails: Any) -> None:
    message = fails("--load", str(saved), *options.split())
    assert key in message
    assert fix in message


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ("manifest emptied", "manifest.json cannot be read"),
        ("manifest foreign", "manifest.json has format None, expected 1"),
        ("manifest gone", "it is not complete: no manifest.json"),
        ("state gone", "it cannot be read"),
        ("array cut", "bytes, expected"),
        ("array gone", "is missing"),
    ],
)
def test_a_damaged_checkpoint_is_named(damage: str, what: str, saved: Path, fails: Any, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    step = folder / "1"
    if damage == "state gone":
        shutil.rmtree(step / "state")
    elif damage == "manifest gone":
        (step / "manifest.json").unlink()
    elif damage.startswith("manifest"):
        (step / "manifest.json").write_text("" if damage.endswith("emptied") else json.dumps({"a": 1}))
    else:
        for path in (step / "state" / "ocdbt.process_0" / "d").iterdir():
            path.unlink() if damage == "array gone" else path.write_bytes(path.read_bytes()[:-1])
    message = fails(*NO_DROPOUT, "--load", str(folder))
    assert f"--load {folder}: none of its steps can be used: step 1: " in message
    assert what in message
    message = fails(*NO_DROPOUT, "--load", str(folder), "--ckpt-step", "1")
    assert f"--load {folder}: the checkpoint of step 1 cannot be restored into this run: " in message
    assert what in message


def test_arrays_that_are_missing_too_many_or_of_another_shape_are_named(
    saved: Path, fails: Any, tmp_path: Path
) -> None:
    """Nothing stays silently at its start value."""
    checkpoint, _ = reader.find(str(saved))
    assert checkpoint is not None
    arrays = {name: jnp.asarray(array) for name, array in saved_arrays(saved, 1).items()}
    del arrays["parameters/final_norm/bias"]
    arrays["parameters/extra/bias"] = jnp.zeros(3)
    arrays["parameters/final_norm/scale"] = jnp.ones(33)
    writer = CheckpointWriter(str(tmp_path), in_background=False)
    writer.save(1, arrays, checkpoint.manifest.meta)
    assert [outcome.problem for outcome in writer.outcomes()] == [""]
    message = fails(*NO_DROPOUT, "--load", str(tmp_path))
    assert "the checkpoint of step 1 does not fit this run" in message
    assert "parameters/final_norm/bias is missing, expected [32]" in message
    assert "parameters/extra/bias [3] is not part of this run" in message
    assert "parameters/final_norm/scale is [33], expected [32]" in message


def test_a_file_is_no_checkpoint_folder(fails: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file, expected a folder" in fails("--load", str(tmp_path / "file"))


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_load_folder_starts_afresh_with_a_word(exists: bool, tmp_path: Path) -> None:
    folder = tmp_path / "load"
    if exists:
        folder.mkdir()
    run = train(tmp_path, *NO_DROPOUT, "--load", str(folder), "--exit-interval", "1", devices=8)
    assert f"--load {folder}: no checkpoint there yet, starting from random weights" in run.out
    assert list(run.steps) == [1]
    assert folder.exists() == exists


# ---- real processes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-layerz", "2"], ["--num-layerz", "--num-layers"]),
        (["--num-cpu-devices", "4", "--save", "/proc/nowhere"], ["--save /proc/nowhere"]),
        (["--num-cpu-devices", "4", "--no-mock-data", "--data-path", "nothing", "--vocab-size", "257",
          "--padded-vocab-size", "264"], ["nothing"]),
        (["--num-cpu-devices", "4", "--attention-backend", "fused"], ["attention_backend fused cannot serve"]),
    ],
    ids=["unknown option", "unwritable", "no data", "fused on a CPU"],
)  # fmt: skip
def test_the_program_ends_with_status_2_and_one_message(options: list[str], words: list[str], tmp_path: Path) -> None:
    done = train_process(tmp_path, *options)
    assert done.returncode == 2
    assert done.stderr.startswith("train.py: error: ")
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_finishes_its_step_saves_and_ends_with_status_0(
    number: signal.Signals, tmp_path: Path
) -> None:
    save = tmp_path / "save"
    options = command("--num-cpu-devices", "2", "--train-iters", "100000", *NO_DROPOUT, "--save", str(save))
    with subprocess.Popen(
        options, env=quick_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " iteration " in line:
                process.send_signal(number)
                break
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    (step,) = (path.name for path in save.iterdir())
    assert out.splitlines()[-2] == f"exiting at iteration {step} ({number.name})"
    assert out.splitlines()[-1].startswith(f"saved checkpoint of iteration {step} in ")
    assert err == (
        f"train.py: {number.name}: leaving after this step, and saving where --save says so; a second signal leaves at"
        " once\n"
    )


def test_a_closed_standard_output_ends_the_run_in_one_line(tmp_path: Path) -> None:
    options = command("--num-cpu-devices", "2", "--train-iters", "100000", *NO_DROPOUT)
    with subprocess.Popen(
        options, env=quick_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        process.wait(60)
    assert process.returncode == 1
    assert err == "train.py: standard output was closed, stopping\n"
