"""The tokenizer's options of a run, and what `--sft` brings with it."""

import dataclasses
from typing import get_args

import pytest

from jmegatron.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig, resolve, validate
from jmegatron.config.sections import TokenizerType
from jmegatron.data.tokenizers import TOKENIZER_TYPES, NullTokenizer, build_tokenizer, tokenizer_settings
from jmegatron.errors import ConfigError


def _config(vocab_size=None, **data):
    return Config(
        model=ModelConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=8,
            seq_length=32,
            max_position_embeddings=32,
            vocab_size=vocab_size,
        ),
        data=DataConfig(**({"data_path": ("corpus",)} | data)),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=2, train_iters=5),
    )


def test_config_and_tokenizers_know_the_same_types():
    assert get_args(TokenizerType) == TOKENIZER_TYPES


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "--tokenizer-model"),
        ({"tokenizer_type": "SentencePieceTokenizer"}, "--tokenizer-model"),
        ({"tokenizer_type": "TikTokenizer"}, "--tokenizer-model"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "--vocab-file and --merge-file"),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size"),
    ],
)
def test_tokenizer_without_its_files_is_refused(options, flags):
    with pytest.raises(ConfigError, match=f"give {flags}"):
        validate(_config(**options))


def test_options_of_a_run_build_the_tokenizer():
    config = _config(vocab_size=5, tokenizer_type="NullTokenizer")
    tokenizer = build_tokenizer(**tokenizer_settings(config.data), vocab_size=config.model.vocab_size)
    assert isinstance(tokenizer, NullTokenizer)
    assert tokenizer.eod == 5
    assert set(tokenizer_settings(config.data)) == {
        "tokenizer_type",
        "tokenizer_model",
        "vocab_file",
        "merge_file",
        "tiktoken_pattern",
        "tiktoken_num_special_tokens",
        "tiktoken_special_tokens",
    }


def test_null_tokenizer_adds_its_end_of_document_to_the_vocabulary():
    config = _config(vocab_size=128, tokenizer_type="NullTokenizer")
    resolved = resolve(config, vocab_size=NullTokenizer(128).vocab_size)
    assert (resolved.model.vocab_size, resolved.model.padded_vocab_size) == (129, 256)
    other = dataclasses.replace(config, data=DataConfig(data_path=("corpus",)))
    with pytest.raises(ConfigError, match="more token ids"):
        resolve(other, vocab_size=129)


def test_conversations_are_kept_apart_and_read_from_one_file():
    resolved = resolve(_config(sft=True))
    assert resolved.data.reset_position_ids
    assert resolved.data.reset_attention_mask
    validate(_config(sft=True))
    with pytest.raises(ConfigError, match="reads one file"):
        validate(_config(sft=True, data_path=("a", "b")))
    with pytest.raises(ConfigError, match="reads one file"):
        validate(_config(sft=True, data_path=(), mock_data=True))
