"""Configuration of a run: frozen dataclasses, loading, cross-field checks (no communication, no jax).

    config = parse_or_exit(sys.argv[1:])                   # defaults < YAML < command line, checked
    dp = validate_for_devices(config, jax.device_count())  # once the devices are known
    config = resolve(config, vocab_size=tokenizer.vocab_size, data_parallel_size=dp)

`sections` holds the options, `options` one record per option, `megatron_flags` what a pasted Megatron-LM launch line
may contain besides them, `command_line` and `loading` read, `layer_split` cuts the model into pipeline stages,
`validation` refuses, `resolution` fills in what follows.

Reference: `megatron/training/arguments.py`.
"""

from jmegatron.config.layer_split import LayerSplit, layer_split_of
from jmegatron.config.loading import config_from_yaml, load_config, parse_or_exit, to_yaml
from jmegatron.config.resolution import (
    attention_window,
    cp_comm_types,
    default_ffn_hidden_size,
    moe_layers,
    moe_places,
    padded_vocab_size,
    resolve,
)
from jmegatron.config.sections import (
    SECTIONS,
    CheckpointConfig,
    Config,
    DataConfig,
    HardwareConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from jmegatron.config.validation import validate, validate_for_devices

__all__ = [
    "SECTIONS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "HardwareConfig",
    "LayerSplit",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainingConfig",
    "attention_window",
    "config_from_yaml",
    "cp_comm_types",
    "default_ffn_hidden_size",
    "layer_split_of",
    "load_config",
    "moe_layers",
    "moe_places",
    "padded_vocab_size",
    "parse_or_exit",
    "resolve",
    "to_yaml",
    "validate",
    "validate_for_devices",
]
