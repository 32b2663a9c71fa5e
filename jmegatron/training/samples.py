"""The training, validation and test samples that the options ask for. No communication."""

from typing import Any

from jmegatron.config import Config
from jmegatron.config.sections import DataConfig
from jmegatron.data.blend import Blend, parse_blend, read_data_args, read_split_data_args
from jmegatron.data.borders import Borders
from jmegatron.data.build import GPTSources, NumSamples, build_gpt_datasets
from jmegatron.data.demo_corpus import ensure_demo_corpus
from jmegatron.data.gpt_dataset import NO_PAD, Sources
from jmegatron.data.sft import SFTSources, build_sft_datasets
from jmegatron.errors import UsageError
from jmegatron.training.resume import Resume


def build_data(config: Config, tokenizer: Any, resume: Resume | None = None) -> Sources:
    """Returns the training, validation and test samples (None where there are none).

    A resumed run's batches follow on the samples it consumed, also when the global batch size is another one now.

    Raises:
      UsageError: data are missing or damaged, or evaluation is asked for and there is nothing to evaluate on.
    """
    data, training = config.data, config.training
    train, valid, test = (
        _sft_sources(config, tokenizer, resume) if data.sft else _gpt_sources(config, tokenizer, resume)
    )
    where = f"--split {data.split}" if data.split else "the corpora for each part"
    if train is None:
        raise UsageError(f"{where}: no documents to train on; fix: give training a weight above 0, or a corpus")
    if valid is None and training.eval_iters:
        raise UsageError(
            f"{where}: no documents to evaluate on, but --eval-iters is {training.eval_iters}; fix: give"
            " validation a weight above 0 or a corpus, or --eval-iters 0"
        )
    return train, valid, test


def _sft_sources(config: Config, tokenizer: Any, resume: Resume | None) -> SFTSources:
    data = config.data
    assert data.split is not None
    return build_sft_datasets(
        data.data_path[0],
        tokenizer,
        seq_len=config.model.seq_length,
        seed=config.training.seed,
        split=data.split,
        num_samples=_num_samples(config, resume),
    )


def _gpt_sources(config: Config, tokenizer: Any, resume: Resume | None) -> GPTSources:
    data = config.data
    assert config.model.vocab_size is not None
    return build_gpt_datasets(
        corpora(data),
        mock=data.mock_data,
        vocab_size=config.model.vocab_size,
        seq_len=config.model.seq_length,
        seed=config.training.seed,
        split=data.split,
        num_samples=_num_samples(config, resume),
        cache_dir=data.data_cache_path,
        borders=Borders(
            eod_token=None if tokenizer is None else tokenizer.eod,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        ),
        pad_token=pad_token(tokenizer),
        surplus=data.mid_level_dataset_surplus,
        require_test=False,
    )


def corpora(data: DataConfig) -> str | Blend | tuple[Blend | None, ...] | None:
    """Returns what the samples are cut from, as `build_gpt_datasets` takes it; None for made-up samples.

    Raises:
      UsageError: a blend or a file that names one cannot be read.
    """
    if data.demo_data:
        return ensure_demo_corpus(data.data_cache_path)
    if data.data_path:
        return parse_blend(data.data_path)
    if data.data_args_path:
        return parse_blend(read_data_args(data.data_args_path), "--data-args-path")
    if data.per_split_data_args_path:
        parts = read_split_data_args(data.per_split_data_args_path)
    elif data.train_data_path:
        parts = {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}
    else:
        return None
    return tuple(parse_blend(words, f"--{name}-data-path") if words else None for name, words in parts.items())


def pad_token(tokenizer: Any) -> int:
    """Returns the tokenizer's padding id, NO_PAD where it has none or shares it with the end of document."""
    pad = getattr(tokenizer, "pad", None)
    return NO_PAD if pad is None or pad == tokenizer.eod else pad


def _num_samples(config: Config, resume: Resume | None) -> NumSamples:
    """Returns the samples that training, validation and test need, as many as the reference asks for."""
    training = config.training
    size = training.global_batch_size
    assert size is not None and training.train_iters is not None
    steps_left = training.train_iters - (resume.step if resume else 0)
    evaluations = training.train_iters // training.eval_interval + 1
    needed = (resume.consumed_samples if resume else 0) + max(steps_left, 0) * size
    return (
        max(needed, training.train_samples or 0),  # as the reference: the samples of no whole batch, too
        evaluations * training.eval_iters * size,
        training.eval_iters * size,
    )
