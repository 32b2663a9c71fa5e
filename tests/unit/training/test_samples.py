"""From the options to the samples: every way to name corpora, and what stops."""

import json
import types

import numpy as np
import pytest

from jmegatron.config import load_config, resolve, validate
from jmegatron.data.gpt_dataset import NO_PAD
from jmegatron.data.indexed_dataset import IndexedDatasetBuilder
from jmegatron.errors import UsageError
from jmegatron.training.samples import build_data, pad_token

TOKENIZER = types.SimpleNamespace(eod=0)


@pytest.fixture
def corpora(tmp_path):
    """Two corpora whose tokens tell them apart: below and from 50 on."""
    for name, low in (("a", 0), ("b", 50)):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for number in range(30):
                builder.add_document(np.arange(20) + low + number)
            builder.finalize()
    return str(tmp_path / "a"), str(tmp_path / "b")


def _data(*words, eval_iters=1):
    line = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 --lr 1 "
        f"--micro-batch-size 1 --global-batch-size 4 --train-iters 5 --vocab-size 128 --eval-iters {eval_iters}"
    )
    config = load_config([*line.split(), *words])
    validate(config)
    config = resolve(config)
    validate(config)  # what is printed at the start reads back
    return build_data(config, TOKENIZER)


def _same(left, right):
    return all(
        (one is None) == (other is None)
        and (one is None or np.array_equal(one.batch(np.arange(4))["tokens"], other.batch(np.arange(4))["tokens"]))
        for one, other in zip(left, right, strict=True)
    )


def test_blend_on_the_command_line_and_in_a_file_are_the_same(corpora, tmp_path):
    words = ("0.3", corpora[0], "0.7", corpora[1])
    (tmp_path / "f").write_text(" ".join(words))
    direct = _data("--data-path", *words, "--split", "80,10,10")
    assert _same(direct, _data("--data-args-path", str(tmp_path / "f"), "--split", "80,10,10"))
    assert len(direct[0]) == 20
    assert np.bincount(direct[0].index.dataset_index).tolist() == [6, 14]


def test_parts_on_the_command_line_and_in_a_file_are_the_same(corpora, tmp_path):
    parts = {"train": [corpora[0]], "valid": ["1", corpora[1], "2", corpora[0]], "test": []}
    (tmp_path / "f").write_text(json.dumps(parts))
    direct = _data("--train-data-path", corpora[0], "--valid-data-path", *parts["valid"])
    assert _same(direct, _data("--per-split-data-args-path", str(tmp_path / "f")))
    assert direct[2] is None
    assert sorted(set(direct[0].index.document_index.tolist())) == list(range(30))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--split", "1,0,0", "--data-path", "A"], "--split 1,0,0: no documents to evaluate on, but --eval-iters is 1"),
        (["--train-data-path", "A"], "the corpora for each part: no documents to evaluate on"),
        (["--split", "999,1,0", "--data-path", "A"], "--split leaves the valid part 0 of the 30 sequences"),
    ],
)
def test_validation_without_documents_stops_only_when_evaluation_is_asked_for(corpora, words, message):
    words = [corpora[0] if word == "A" else word for word in words]
    with pytest.raises(UsageError, match=message):
        _data(*words)
    train, valid, test = _data(*words, eval_iters=0)
    assert len(train) >= 20
    assert valid is test is None


def test_surplus_is_handed_on(corpora):
    train, *_ = _data("--data-path", "1", *corpora[:1], "1", *corpora[1:], "--mid-level-dataset-surplus", "3")
    assert all(len(part) >= 40 for part in train.datasets)


def test_padding_id_counts_only_where_it_is_not_the_end_of_document():
    assert pad_token(None) == pad_token(TOKENIZER) == NO_PAD
    assert pad_token(types.SimpleNamespace(eod=5, pad=5)) == NO_PAD
    assert pad_token(types.SimpleNamespace(eod=5, pad=0)) == 0
