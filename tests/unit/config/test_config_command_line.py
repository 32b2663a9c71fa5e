"""Command line: what is read, what is refused and with which message and exit status."""

import re
import shlex
import subprocess
import sys

import pytest

from jmegatron.config import attention_window, config_from_yaml, load_config, parse_or_exit, to_yaml
from jmegatron.config.megatron_flags import (
    ALIASES,
    IGNORED,
    UNSUPPORTED,
    UNSUPPORTED_FAMILIES,
    VALUE_ALIASES,
)
from jmegatron.config.options import flag_of, options

BASE = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--lr 1e-3 --micro-batch-size 2 --train-iters 5 --mock-data"
)

PIPELINE_BASE = ["--num-layers", "8", *BASE[2:], "--pipeline-model-parallel-size", "2"]
LAYOUT = "--pipeline-model-parallel-layout"

MEGATRON_LINE = shlex.split(
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096 "
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --micro-batch-size 1 "
    "--num-layers-per-virtual-pipeline-stage 5 --recompute-activations "
    "--global-batch-size 1024 --bf16 --attention-backend auto --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.01 --clip-grad 1.0 --weight-decay 0.1 --train-iters 250000 --data-path PREFIX "
    "--split 949,50,1 --save DIR --load DIR --save-interval 1000 --ckpt-format torch_dist --log-interval 10 "
    "--eval-interval 1000 --eval-iters 10 --use-mcore-models --transformer-impl transformer_engine "
    "--distributed-backend nccl --no-gradient-accumulation-fusion --num-workers 2"
)


def refusal(capsys: pytest.CaptureFixture[str], *extra: str) -> str:
    """Returns the one message of a command line that must end with status 2."""
    with pytest.raises(SystemExit) as exit_info:
        parse_or_exit([*BASE, *extra])
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("error:") == 1
    for part in ("where:", "got:", "expected:", "fix:"):
        assert err.count(part) == 1
    return err


def test_a_pasted_megatron_line_works_and_reports_what_has_no_effect():
    config = load_config(MEGATRON_LINE)
    assert config.parallel.tensor_model_parallel_size == 8
    assert (config.parallel.pipeline_model_parallel_size, config.parallel.pipeline_schedule) == (4, "interleaved")
    assert (config.training.recompute_granularity, config.training.recompute_modules) == ("selective", ("core_attn",))
    assert config.optimizer.lr_warmup_fraction == 0.01
    assert config.data.data_path == ("PREFIX",)
    assert config.data.split == "949,50,1"
    assert [flag for flag, _ in config.ignored_flags] == [
        "--ckpt-format",
        "--use-mcore-models",
        "--transformer-impl",
        "--distributed-backend",
        "--no-gradient-accumulation-fusion",
    ]
    assert config.data.num_workers == 2
    assert all(reason for _, reason in config.ignored_flags)


def test_a_pasted_line_of_a_long_context_works():
    config = load_config(
        shlex.split(
            "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
            "--group-query-attention --num-query-groups 8 --seq-length 131072 --max-position-embeddings 131072 "
            "--position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0 --use-rope-scaling "
            "--rope-scaling-factor 8.0 --normalization RMSNorm --swiglu --disable-bias-linear "
            "--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 "
            "--tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 8 --cp-comm-type allgather "
            "--window-size '(8191,0)' --attention-backend flash --micro-batch-size 1 --global-batch-size 32 "
            "--train-iters 100 --lr 1e-5 --bf16 --mock-data"
        )
    )
    assert (config.parallel.context_parallel_size, config.parallel.cp_comm_type) == (8, ("all_gather",))
    assert (config.model.use_rope_scaling, config.model.rope_scaling_factor) == (True, 8.0)
    assert (attention_window(config.model), config.hardware.attention_backend) == (8191, "fused")
    assert config.ignored_flags == ()
    assert config_from_yaml(to_yaml(config)) == config


def test_values_in_the_references_words_are_read_everywhere():
    types = load_config([*BASE, "--cp-comm-type", "allgather", "p2p"]).parallel.cp_comm_type
    assert types == ("all_gather", "p2p")
    for alias in VALUE_ALIASES:
        section, name = options()[alias.name].section, alias.name
        for value in (alias.value, alias.own):
            line = load_config([*BASE, flag_of(name), value])
            file = config_from_yaml(to_yaml(line).replace(f"{name}: {alias.own}", f"{name}: {value}"))
            expected = (alias.own,) if options()[name].is_list else alias.own
            assert getattr(getattr(line, section), name) == expected
            assert getattr(getattr(file, section), name) == expected


def test_the_first_unsupported_flag_of_a_pasted_line_is_named(capsys):
    err = refusal(capsys, "--multi-latent-attention", "--use-torch-fsdp2", "--no-such-flag")
    assert err.splitlines()[0].endswith("--multi-latent-attention is a Megatron-LM flag that is not supported here.")
    # The others are named as well, so that a line need not be tried once per flag.
    assert "further on the line also: --use-torch-fsdp2" in err
    assert "--no-such-flag" not in err


@pytest.mark.parametrize("row", UNSUPPORTED, ids=lambda row: row.flag)
def test_every_unsupported_flag_is_refused_with_its_reason(capsys, row):
    err = refusal(capsys, row.flag, *["1"] * max(row.values, 0))
    assert row.flag in err
    assert row.reason in err


@pytest.mark.parametrize(("beginning", "reason"), UNSUPPORTED_FAMILIES)
def test_families_of_unsupported_flags_are_refused(capsys, beginning, reason):
    assert reason in refusal(capsys, beginning + "anything", "1")


@pytest.mark.parametrize(
    "flag",
    [
        "--moe-router-topk-limited-devices",
        "--moe-permute-padding-for-quantization",
        "--moe-expert-rank-capacity-factor",
    ],
)
def test_flags_of_experts_that_are_no_options_are_not_supported_and_no_slips(capsys, flag):
    err = refusal(capsys, flag, "1")
    assert "is a Megatron-LM flag that is not supported here" in err
    assert "did you mean" not in err


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("--moe-router-topkk", "--moe-router-topk"),
        ("--moe-ffn-hiden-size", "--moe-ffn-hidden-size"),
        ("--moe-grouped-gem", "--moe-grouped-gemm"),
    ],
)
def test_a_misspelled_option_of_experts_names_the_right_one(capsys, slip, meant):
    assert f"did you mean {meant}?" in refusal(capsys, slip, "1")


def test_a_dispatcher_that_the_reference_does_not_have_is_refused(capsys):
    for kind in ("allgather", "alltoall", "flex"):
        config = load_config([*BASE, "--moe-token-dispatcher-type", kind])
        assert config.ignored_flags[0][0] == "--moe-token-dispatcher-type"
    for words in (["--moe-token-dispatcher-type", "ring"], ["--moe-token-dispatcher-type=ring"]):
        err = refusal(capsys, *words)
        assert "'ring'" in err
        assert "one of allgather, alltoall, flex" in err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--moe-router-load-balancing-type aux_loss seq_aux_loss", "moe_router_load_balancing_type"),
        ("--moe-aux-loss-coeff 0.1 0.2", "moe_aux_loss_coeff"),
        ("--moe-aux-loss-coeff=0.1 0.2", "moe_aux_loss_coeff"),
    ],
)
def test_several_balancing_types_are_refused_by_name(capsys, words, name):
    err = refusal(capsys, "--num-experts", "4", *words.split(), "--bf16")
    assert f"{name} has several values: several balancing types at once" in err
    assert f"got: {' '.join(words.replace('=', ' ').split()[1:])}\n" in err


@pytest.mark.parametrize("row", IGNORED, ids=lambda row: row.flag)
def test_every_flag_without_effect_leaves_the_config_unchanged(row):
    value = row.choices[0] if row.choices else "1"
    extra = [row.flag, *[value] * max(row.values, 0), "--position-embedding-type", "rope"]
    config = load_config([*BASE, *extra])
    assert config == load_config([*BASE, "--position-embedding-type", "rope"])
    assert config.ignored_flags == ((row.flag, row.reason),)
    if row.values == 1:
        assert load_config([*BASE, f"{row.flag}={value}", *extra[2:]]) == config


def test_a_flag_without_effect_may_stand_last_without_its_value():
    assert load_config([*BASE, "--distributed-backend"]).ignored_flags[0][0] == "--distributed-backend"


def test_the_flag_tables_and_the_options_name_nothing_twice():
    known = [option.flag for option in options().values()]
    known += [option.negation for option in options().values() if option.negation]
    known += [row.flag for row in (*ALIASES, *IGNORED, *UNSUPPORTED)]
    assert len(known) == len(set(known))


def test_unknown_option_names_the_nearest(capsys):
    err = refusal(capsys, "--tensor-model-paralel-size", "2")
    assert "Unknown option --tensor-model-paralel-size" in err
    assert "did you mean --tensor-model-parallel-size?" in err


def test_unknown_option_far_from_all_points_to_help(capsys):
    assert "--help" in refusal(capsys, "--zzzzqqqq")


def test_abbreviations_are_refused(capsys):
    assert "Unknown option --hidden" in refusal(capsys, "--hidden", "3")


def test_single_dash_and_bare_double_dash_are_unknown(capsys):
    assert "Unknown option -x" in refusal(capsys, "-x")
    assert "Unknown option --." in refusal(capsys, "--")


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--num-layers", "3.5", "an integer"),
        ("--num-layers", "true", "an integer"),
        ("--num-layers", "null", "an integer"),
        ("--lr", "fast", "a number"),
        ("--normalization", "layernorm", "one of LayerNorm, RMSNorm"),
        ("--activation", "relu", "one of gelu_tanh"),
        ("--attention-backend", "cudnn", "one of auto, fused, unfused"),
        ("--optimizer", "soap", "one of adam, sgd, lion, muon"),
    ],
)
def test_wrong_type_names_option_value_and_type(capsys, flag, value, expected):
    err = refusal(capsys, flag, value)
    assert flag in err
    assert repr(value) in err
    assert expected in err


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "a${b}", "???"])
def test_interpolation_is_refused_on_the_command_line(capsys, value):
    assert "Interpolation" in refusal(capsys, "--save", value)


def test_switches_take_no_value(capsys):
    assert "--no-bf16" in refusal(capsys, "--bf16", "true")
    assert "--no-bf16" in refusal(capsys, "--bf16=true")
    assert "takes no value" in refusal(capsys, "--swiglu=1")


def test_an_option_without_its_value_is_refused(capsys):
    assert "--lr needs a value" in refusal(capsys, "--lr")
    assert "--lr needs a value" in refusal(capsys, "--lr", "--bf16")
    assert "--config needs a value" in refusal(capsys, "--config")


def test_a_value_that_belongs_to_no_option_is_refused(capsys):
    assert "'stray'" in refusal(capsys, "--lr", "1e-3", "stray")
    assert "'config.yaml'" in refusal(capsys, "--seed=3", "config.yaml")


def test_two_config_files_are_refused(capsys):
    assert "--config is given more than once" in refusal(capsys, "--config", "a.yaml", "--config", "b.yaml")


def test_equals_negative_and_scientific_values_are_read(capsys):
    assert load_config([*BASE, "--lr=2e-3"]).optimizer.lr == 2e-3
    for value in ("-1e-5", "-3", "-.5"):
        assert "min_lr is out of range" in refusal(capsys, "--min-lr", value)
        assert "min_lr is out of range" in refusal(capsys, f"--min-lr={value}")
    for words in (["--window-size", "-1,0"], ["--window-size=-1,0"]):
        assert load_config([*BASE, *words]).model.window_size == "-1,0"


def test_the_last_of_a_repeated_option_counts():
    assert load_config([*BASE, "--seed", "1", "--seed", "2"]).training.seed == 2


def test_switches_and_their_negations():
    assert load_config([*BASE, "--bf16"]).training.bf16
    assert not load_config([*BASE, "--bf16", "--no-bf16"]).training.bf16
    assert not load_config([*BASE, "--no-mask-padded-vocab"]).model.mask_padded_vocab
    assert load_config([*BASE, "--disable-bias-linear"]).model.disable_bias_linear
    assert not load_config([*BASE, "--no-disable-bias-linear"]).model.disable_bias_linear
    assert load_config([*BASE, "--untie-embeddings-and-output-weights"]).model.untie_embeddings_and_output_weights
    assert load_config([*BASE, "--no-compilation-cache"]).hardware.no_compilation_cache
    assert not load_config([*BASE, "--compilation-cache"]).hardware.no_compilation_cache


def test_null_takes_an_optional_value_back():
    assert load_config([*BASE, "--save", "a", "--save", "null"]).checkpoint.save is None


def test_missing_required_options_are_all_named(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_or_exit(["--hidden-size", "8"])
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    for flag in (
        "--num-layers",
        "--num-attention-heads",
        "--seq-length",
        "--lr",
        "--micro-batch-size",
    ):
        assert flag in err
    assert "--hidden-size" not in err


def test_the_length_of_the_run_is_required_in_one_of_two_ways(capsys):
    without = [*BASE[: BASE.index("--train-iters")], "--mock-data"]
    with pytest.raises(SystemExit):
        parse_or_exit(without)
    assert "give --train-iters, or --train-samples" in capsys.readouterr().err
    config = load_config([*without, "--train-samples", "43", "--global-batch-size", "8"])
    assert config.training.train_iters == 5
    assert config_from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("extra", "activation"),
    [
        ([], "gelu_tanh"),
        (["--disable-bias-linear"], "gelu_erf"),
        (["--disable-bias-linear", "--activation", "gelu_tanh"], "gelu_tanh"),
        (["--no-bias-gelu-fusion"], "gelu_erf"),
        (["--no-bias-gelu-fusion", "--activation", "gelu_tanh"], "gelu_tanh"),
        (["--no-bias-gelu-fusion", "--swiglu"], "swiglu"),
        (["--swiglu"], "swiglu"),
        (["--swiglu", "--activation", "swiglu"], "swiglu"),
        (["--squared-relu"], "squared_relu"),
        (["--openai-gelu", "--disable-bias-linear"], "gelu_tanh"),
    ],
)
def test_activation_follows_the_reference_unless_named(extra, activation):
    assert load_config([*BASE, *extra]).model.activation == activation


@pytest.mark.parametrize("extra", [["--swiglu", "--activation", "geglu"], ["--swiglu", "--squared-relu"]])
def test_contradicting_activations_stop(capsys, extra):
    err = refusal(capsys, *extra)
    assert "contradicts" in err
    assert "--swiglu" in err


def test_a_layout_is_read_as_it_is_written():
    text = "Et*3|(t|)*3,tt|L"
    config = load_config([*PIPELINE_BASE, "--pipeline-model-parallel-size", "3", LAYOUT, text])
    assert config.parallel.pipeline_model_parallel_layout == text
    assert config.parallel.pipeline_schedule == "interleaved"


def test_the_cut_on_the_command_line_wins_over_the_file(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {num_layers: 8}\n"
        "parallel:\n"
        "  pipeline_model_parallel_size: 2\n"
        "  num_virtual_stages_per_pipeline_rank: 2\n"
        "training: {recompute_granularity: full}\n"
    )
    line = [*PIPELINE_BASE[2:], "--config", str(path)]
    assert load_config(line).parallel.pipeline_schedule == "interleaved"
    other = load_config([*line, "--num-virtual-stages-per-pipeline-rank", "1"])
    assert other.parallel.pipeline_schedule == "1f1b"
    undone = load_config([*line, "--num-virtual-stages-per-pipeline-rank", "null", LAYOUT, "Et*4|t*4L"])
    assert undone.parallel.pipeline_model_parallel_layout == "Et*4|t*4L"
    assert undone.training.recompute_num_layers == 1
    assert load_config([*line, "--recompute-granularity", "null"]).training.recompute_granularity is None
    assert load_config([*line, "--recompute-activations"]).training.recompute_granularity == "selective"
    with pytest.raises(SystemExit):
        parse_or_exit([*line, "--num-layers-per-virtual-pipeline-stage", "1"])
    err = capsys.readouterr().err
    assert "num_virtual_stages_per_pipeline_rank 2, num_layers_per_virtual_pipeline_stage 1" in err
    assert "--num-virtual-stages-per-pipeline-rank null" in err


def test_a_printed_pipeline_config_reads_back():
    config = load_config([*PIPELINE_BASE, "--num-virtual-stages-per-pipeline-rank", "2", "--recompute-activations"])
    assert config_from_yaml(to_yaml(config)) == config


def test_recompute_activations_contradicts_full_recomputation(capsys):
    err = refusal(capsys, "--recompute-activations", "--recompute-granularity", "full")
    assert "--recompute-activations means --recompute-granularity selective" in err


def test_old_spellings_of_positions(capsys):
    line = [*BASE, "--use-rotary-position-embeddings", "--no-position-embedding"]
    assert load_config(line).model.position_embedding_type == "rope"
    assert "--no-position-embedding" in refusal(capsys, "--no-position-embedding")


def test_help_lists_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_or_exit(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    for option in options().values():
        assert re.search(rf"^  {option.flag}\b", text, re.MULTILINE), option.flag
        assert " ".join(option.help.split()[:4]) in words, option.flag
        assert option.section + ":\n" in text
    for expected in ("(required)", "(default: 1234)", "(default: derived)", "(default: not set)", "(default: true)"):
        assert expected in words


def test_print_config_shows_all_options_and_exits(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_or_exit([*BASE, "--print-config"])
    assert exit_info.value.code == 0
    out, err = capsys.readouterr()
    assert out == to_yaml(load_config(BASE))
    assert err == ""
    for name in options():
        assert f"  {name}:" in out


def test_every_option_has_help_and_a_unique_name():
    from dataclasses import fields

    from jmegatron.config import SECTIONS

    names = [field.name for cls in SECTIONS.values() for field in fields(cls)]
    assert len(names) == len(set(names)) == len(options())
    assert not set(names) & set(SECTIONS) - {"optimizer"}
    for option in options().values():
        assert option.help.endswith("."), option.name


def _python(code: str, *argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120)


def test_process_exits_with_2_and_one_message():
    code = "import sys; from jmegatron.config import parse_or_exit; parse_or_exit(sys.argv[1:])"
    result = _python(code, *BASE, "--num-layer", "3")
    assert result.returncode == 2
    assert "did you mean --num-layers?" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_reading_a_config_loads_no_jax():
    code = (
        "import sys; from jmegatron.config import parse_or_exit; parse_or_exit(sys.argv[1:]); "
        "assert not {'jax', 'flax', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    result = _python(code, *BASE)
    assert result.returncode == 0, result.stderr
