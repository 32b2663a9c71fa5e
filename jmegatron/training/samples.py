"""The training, validation and test samples that the options ask for. No communication."""

from typing import Any

from jmegatron.config import Config
from jmegatron.data.borders import Borders
from jmegatron.data.build import GPTSources, build_gpt_datasets
from jmegatron.data.demo_corpus import ensure_demo_corpus
from jmegatron.errors import UsageError
from jmegatron.training.resume import Resume


def build_data(config: Config, tokenizer: Any, resume: Resume | None = None) -> GPTSources:
    """Returns the training, validation and test samples (None where there are none).

    A resumed run's batches follow on the samples it consumed, also when the global batch size is another one now.

    Raises:
      UsageError: data are missing or damaged, or evaluation is asked for and there is nothing to evaluate on.
    """
    data, training = config.data, config.training
    assert training.global_batch_size is not None and config.model.vocab_size is not None and data.split
    prefix = ensure_demo_corpus(data.data_cache_path) if data.demo_data else None
    if data.data_path:
        (prefix,) = data.data_path
    size = training.global_batch_size
    steps_left = training.train_iters - (resume.step if resume else 0)
    evaluations = training.train_iters // training.eval_interval + 1
    train, valid, test = build_gpt_datasets(
        prefix,
        mock=data.mock_data,
        vocab_size=config.model.vocab_size,
        seq_len=config.model.seq_length,
        seed=training.seed,
        split=data.split,
        num_samples=(
            (resume.consumed_samples if resume else 0) + max(steps_left, 0) * size,
            evaluations * training.eval_iters * size,
            training.eval_iters * size,
        ),
        cache_dir=data.data_cache_path,
        borders=Borders(
            eod_token=None if tokenizer is None else tokenizer.eod,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        ),
        require_test=False,
    )
    if train is None:
        raise UsageError(f"--split {data.split}: no documents to train on; fix: give training a weight above 0")
    if valid is None and training.eval_iters:
        raise UsageError(
            f"--split {data.split}: no documents to evaluate on, but --eval-iters is {training.eval_iters}; fix: give"
            " validation a weight above 0, or --eval-iters 0"
        )
    return train, valid, test
