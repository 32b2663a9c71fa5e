"""Whole short runs: precision, profile, compilation cache, odd sizes, real text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from training_runs import MODEL, OPTIONS, VOCABULARY, train, write_corpus

from jmegatron.config import load_config
from jmegatron.errors import UsageError
from jmegatron.training import startup
from jmegatron.training.profile import Profile
from jmegatron.training.program import build_program, resolve_for_run

NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


# ---- precision ------------------------------------------------------------------------------------------------------
def test_sixty_steps_in_bf16_end_within_two_percent_of_fp32(tmp_path: Path) -> None:
    options = (*NO_DROPOUT, "--train-iters", "60", "--lr", "3e-3")
    fp32, bf16 = train(tmp_path, *options), train(tmp_path, *options, "--bf16")
    assert fp32.losses[-1] < 0.9 * fp32.losses[0]
    assert bf16.losses[-1] < 0.9 * bf16.losses[0]
    assert np.mean(bf16.losses[-5:]) == pytest.approx(np.mean(fp32.losses[-5:]), rel=0.02)
    assert "parameters bfloat16" in bf16.out
    assert "master weights float32" in bf16.out


@pytest.mark.parametrize("bf16", [False, True])
def test_state_dtypes_are_bf16_parameters_and_fp32_for_all_else(bf16: bool) -> None:
    config = load_config([*OPTIONS, *(["--bf16"] if bf16 else [])])
    state = build_program(resolve_for_run(config, 1)[0], jax.devices()[:1]).abstract_state()
    dtypes = lambda tree: {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}  # noqa: E731
    assert dtypes(state.parameters) == {"bfloat16" if bf16 else "float32"}
    assert dtypes(state.master) == ({"float32"} if bf16 else set())
    assert dtypes(state.optimizer) <= {"float32", "int32"}


# ---- profile --------------------------------------------------------------------------------------------------------
def test_profile_writes_a_trace_of_its_steps(tmp_path: Path) -> None:
    profile = f"--profile --profile-step-start 2 --profile-step-end 4 --profile-dir {tmp_path / 'trace'}"
    train(tmp_path, *NO_DROPOUT, *profile.split())
    assert [path.suffix for path in (tmp_path / "trace").rglob("*.xplane.pb")] == [".pb"]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the profiler."""
    calls: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [(2, 4, ["start 2", "stop 3"]), (5, 9, ["start 5", "stop end"]), (8, 9, []), (0, 2, ["start 1", "stop 1"])],
)
def test_the_trace_covers_its_steps_and_never_stays_open(
    first: int, end: int, expected: list[str], traced: list[str]
) -> None:
    wanted = f"--profile --profile-step-start {first} --profile-step-end {end}"
    profile, seen = Profile(load_config([*OPTIONS, *wanted.split()])), []
    for step in range(1, 7):
        profile.before(step)
        profile.after(step, None)
        seen += [f"{call} {step}" for call in traced]
        traced.clear()
    profile.stop()
    assert seen + [f"{call} end" for call in traced] == expected


# ---- compilation cache ----------------------------------------------------------------------------------------------
@pytest.fixture
def jax_options() -> Iterator[None]:
    """Puts back what the program sets for the whole process."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("jax_options")
class TestCompilationCache:
    def test_lies_in_the_users_cache_folder_by_default(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        folder = str(tmp_path / "jmegatron" / "xla")
        assert startup.configure_compilation_cache(load_config(OPTIONS)) == folder
        assert jax.config.jax_compilation_cache_dir == folder

    def test_goes_to_the_home_folder_without_an_xdg_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert startup.user_cache_dir() == tmp_path / ".cache" / "jmegatron"

    def test_is_off_by_option(self) -> None:
        said = startup.configure_compilation_cache(load_config([*OPTIONS, "--no-compilation-cache"]))
        assert said == "off (--no-compilation-cache)"
        assert not jax.config.jax_enable_compilation_cache

    def test_gives_up_an_unwritable_default_with_a_word(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        said = startup.configure_compilation_cache(load_config(OPTIONS))
        assert said.startswith("off (")
        assert "cannot be written (Not a directory)" in said
        assert not jax.config.jax_enable_compilation_cache


# ---- odd sizes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        "--seq-length 1 --num-layers 1 --train-iters 1 --log-interval 50",
        "--vocab-size 2 --padded-vocab-size 2 --train-iters 2",
        "--hidden-size 4 --num-attention-heads 4 --kv-channels 1 --ffn-hidden-size 1 --train-iters 2",
        "--lr 0 --train-iters 2 --profile --profile-step-start 100 --profile-step-end 101 --profile-dir {folder}",
        "--global-batch-size 1 --eval-iters 3 --eval-interval 1000 --train-iters 1",
    ],
)
def test_odd_sizes_train_to_finite_losses(options: str, tmp_path: Path) -> None:
    options = options.format(folder=tmp_path / "trace")
    run = train(tmp_path, *options.split(), devices=1)
    assert np.isfinite(run.losses).all()
    assert ("--profile: its steps are not among 1 .. 2: no trace" in run.out) == ("--profile" in options)
    assert len(run.losses) == int(options.partition("--train-iters ")[2].split()[0])


def test_a_global_batch_larger_than_the_data_repeats_them(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", documents=2, length=20)
    options = f"--no-mock-data --data-path {corpus} --vocab-size 257 --padded-vocab-size 264 --split 1,0,0"
    run = train(tmp_path, *options.split(), "--train-iters", "2")
    assert [line["consumed_samples"] for line in run.metrics] == [8, 16]


# ---- real text ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_training_on_the_demo_text_lowers_the_loss(tmp_path: Path) -> None:
    model = " ".join(MODEL).replace(VOCABULARY, "--vocab-size 257 --padded-vocab-size 264").split()
    options = f"--demo-data --data-cache-path {tmp_path} --train-iters 80 --eval-iters 2 --eval-interval 40"
    longer = ("--seq-length", "64", "--max-position-embeddings", "64")
    run = train(tmp_path, *options.split(), *NO_DROPOUT, *longer, defaults=model)
    assert run.losses[-1] < 0.65 * run.losses[0]
    evaluations: list[Any] = [line["loss"] for line in run.metrics if line.get("split") == "valid"]
    assert evaluations[1] < evaluations[0] < run.losses[0]


def test_a_model_whose_state_exceeds_the_memory_is_refused_before_it_is_made(tmp_path: Path) -> None:
    size = ["--hidden-size", "1000000", "--num-attention-heads", "1000", "--num-layers", "100"]
    with pytest.raises(UsageError, match=r"need [\d,.]+ GiB of this machine's [\d,.]+ GiB"):
        train(tmp_path, *size)
