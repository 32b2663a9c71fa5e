"""Evaluation: what it averages, what it leaves alone, and that its absence is said."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from training_runs import OPTIONS, train, write_corpus

from jmegatron.config import load_config
from jmegatron.errors import UsageError
from jmegatron.training.evaluation import Evaluator
from jmegatron.training.program import Program, build_program, resolve_for_run

SIZE, SEQ = 8, 16


@pytest.fixture(scope="module")
def program() -> Program:
    config = load_config([*OPTIONS, *["--eval-iters", "2", "--hidden-dropout", "0.5", "--attention-dropout", "0.5"]])
    devices = jax.devices()[:4]
    return build_program(resolve_for_run(config, 4)[0], devices)


class Source:
    """Samples of which `counted[batch]` tokens of each global batch count."""

    def __init__(self, counted: list[int]):
        rng = np.random.default_rng(3)
        self._tokens = rng.integers(0, 61, (len(counted) * SIZE, SEQ + 1)).astype(np.int32)
        self._mask = np.zeros((len(counted), SIZE * SEQ), np.float32)
        for batch, count in enumerate(counted):
            self._mask[batch, rng.permutation(SIZE * SEQ)[:count]] = 1.0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        mask = self._mask.reshape(-1, SEQ)[index]
        return {"tokens": self._tokens[index, :-1], "labels": self._tokens[index, 1:], "loss_mask": mask}


def test_evaluation_weighs_tokens_not_batches(program: Program) -> None:
    parameters = program.init().parameters
    one = dataclasses.replace(
        program,
        config=dataclasses.replace(program.config, training=dataclasses.replace(program.config.training, eval_iters=1)),
    )
    source = Source([8, 2])
    both = Evaluator(program, (None, source, None))(parameters, "valid")

    class Second(Source):
        def __getitem__(self, index: int) -> Any:
            return source[index + SIZE]

    first = Evaluator(one, (None, source, None))(parameters, "valid")
    second = Evaluator(one, (None, Second([1]), None))(parameters, "valid")
    assert abs(first - second) > 1e-3
    assert both == pytest.approx((8 * first + 2 * second) / 10, rel=1e-6)


def test_two_evaluations_are_equal_and_leave_the_state_alone(program: Program) -> None:
    """Dropout is 0.5 here: a mask in evaluation would show as a difference between the two."""
    state = program.init()
    before = jax.tree.map(np.asarray, state)
    evaluate = Evaluator(program, (None, Source([128, 100]), None))
    assert evaluate(state.parameters, "valid") == evaluate(state.parameters, "valid")
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state))


def test_evaluation_applies_no_dropout(program: Program) -> None:
    config = program.config
    plain = dataclasses.replace(
        config, model=dataclasses.replace(config.model, hidden_dropout=0.0, attention_dropout=0.0)
    )
    without = build_program(plain, list(program.mesh.devices.flat))
    parameters = program.init().parameters
    source = (None, Source([128, 128]), None)
    assert Evaluator(program, source)(parameters, "valid") == Evaluator(without, source)(parameters, "valid")


def test_evaluating_does_not_change_training(tmp_path: Path) -> None:
    dropout = ("--hidden-dropout", "0.1")
    often = train(tmp_path, *dropout, *["--eval-iters", "2", "--eval-interval", "2"])
    never = train(tmp_path, *dropout)
    assert often.steps == never.steps
    evaluations = [(line["step"], line["split"]) for line in often.metrics if "split" in line]
    assert evaluations == [(2, "valid"), (4, "valid"), (6, "valid"), (6, "test")]
    assert "evaluation: every 2 steps and after the last, on the first 2 x 8 sequences of the validation" in often.out
    assert "evaluation: off (--eval-iters 0)" in never.out


def test_a_validation_split_without_documents_stops(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", vocab=61)
    options = ("--no-mock-data", "--data-path", corpus, *["--vocab-size", "257", "--padded-vocab-size", "264"])
    with pytest.raises(UsageError, match=r"--split 100,0,0: no documents to evaluate on, but --eval-iters is 2.*fix: "):
        train(tmp_path, *options, "--split", "100,0,0", "--eval-iters", "2")


def test_evaluation_reports_the_plain_loss_of_a_run_with_label_smoothing(program: Program) -> None:
    smoothed = dataclasses.replace(
        program,
        settings=dataclasses.replace(
            program.settings, model=dataclasses.replace(program.settings.model, label_smoothing=0.3)
        ),
    )
    parameters = program.init().parameters
    sources = (None, Source([128, 100]), None)
    assert Evaluator(smoothed, sources)(parameters, "valid") == Evaluator(program, sources)(parameters, "valid")
