"""YAML: precedence, round trip, and the traps of the format."""

import re
from pathlib import Path

import pytest

from jmegatron.config import config_from_yaml, load_config, parse_or_exit, to_yaml
from jmegatron.errors import ConfigError

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))

MINIMAL = """
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32, max_position_embeddings: 32}
optimizer: {lr: 1e-3}
training: {micro_batch_size: 2, train_iters: 5}
data: {mock_data: true}
"""


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return str(path)


def message(text: str) -> str:
    """Returns the error of a YAML text that must be refused."""
    with pytest.raises(ConfigError) as error:
        config_from_yaml(text, "some.yaml")
    assert "some.yaml" in str(error.value)
    return str(error.value)


def with_line(section: str, line: str) -> str:
    """Returns the minimal config with one more line in a section, as block style."""
    return to_yaml(config_from_yaml(MINIMAL)).replace(f"{section}:\n", f"{section}:\n  {line}\n", 1)


def replaced(name: str, value: str) -> str:
    """Returns the minimal config with one option written as `value`."""
    lines = to_yaml(config_from_yaml(MINIMAL)).splitlines()
    return "\n".join(f"  {name}: {value}" if line.startswith(f"  {name}:") else line for line in lines)


def test_defaults_give_way_to_the_file_and_the_file_to_the_command_line(minimal):
    config = load_config(["--config", minimal])
    assert config.optimizer.lr == 1e-3
    assert config.optimizer.adam_beta2 == 0.999
    config = load_config(["--config", minimal, "--lr", "5e-4", "--no-mock-data", "--demo-data"])
    assert config.optimizer.lr == 5e-4
    assert config.data.demo_data
    assert not config.data.mock_data


def test_an_alias_on_the_command_line_overrides_the_file(tmp_path):
    path = tmp_path / "geglu.yaml"
    path.write_text(MINIMAL.replace("num_layers", "activation: geglu, num_layers"))
    assert load_config(["--config", str(path)]).model.activation == "geglu"
    assert load_config(["--config", str(path), "--swiglu"]).model.activation == "swiglu"


def test_a_fusion_flag_does_not_override_the_activation_of_the_file(tmp_path):
    path = tmp_path / "geglu.yaml"
    path.write_text(MINIMAL.replace("num_layers", "activation: geglu, num_layers"))
    assert load_config(["--config", str(path), "--no-bias-gelu-fusion"]).model.activation == "geglu"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_load_and_survive_a_round_trip(path):
    config = load_config(["--config", str(path)])
    assert config_from_yaml(to_yaml(config)) == config


def test_the_configs_that_the_readme_lists_ship_and_no_others():
    listed = re.findall(r"^\| `(\w+\.yaml)` \|", (ROOT / "configs" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.name for path in SHIPPED]
    assert {"gpt_tiny.yaml", "gpt2_125m.yaml", "llama3_8b.yaml", "gpt_70b_512gpu.yaml"} <= set(listed)


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--data-path", "some/prefix", "--no-mock-data"],
        ["--save", "off", "--wandb-project", "1e-4", "--tensorboard-dir", "null-ish: #x", "--metrics-file", "0x10"],
        ["--lr", "1e-300", "--min-lr", "1e-301", "--adam-eps", "1e-12"],
        ["--group-query-attention", "--num-query-groups", "2", "--swiglu", "--vocab-size", "300"],
        ["--lr-warmup-fraction", "0.1", "--global-batch-size", "8", "--no-compilation-cache"],
    ],
)
def test_print_config_reads_back_as_an_equal_config(tmp_path, minimal, capsys, extra):
    with pytest.raises(SystemExit) as exit_info:
        parse_or_exit(["--config", minimal, *extra, "--print-config"])
    assert exit_info.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_config(["--config", str(printed)]) == load_config(["--config", minimal, *extra])


def test_numbers_without_a_dot_in_scientific_notation_are_floats():
    config = config_from_yaml(replaced("weight_decay", "1e-4"))
    assert config.optimizer.weight_decay == 1e-4
    assert config_from_yaml(replaced("lr", "6E-4")).optimizer.lr == 6e-4


def test_off_is_false_for_a_switch_and_refused_elsewhere():
    assert config_from_yaml(replaced("bf16", "off")).training.bf16 is False
    assert config_from_yaml(replaced("bf16", "on")).training.bf16 is True
    assert "save" in message(replaced("save", "off"))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_layers", "true", "an integer"),
        ("num_layers", "2.0", "an integer"),
        ("num_layers", "two", "an integer"),
        ("num_layers", "{a: 1}", "an integer"),
        ("num_layers", "null", "an integer"),
        ("lr", "true", "a number"),
        ("lr", "9" * 400, "a number"),
        ("lr", "[1.0]", "a number"),
        ("bf16", "2", "true or false"),
        ("bf16", "1", "true or false"),
        ("bf16", "maybe", "true or false"),
        ("bf16", "null", "true or false"),
        ("lr_decay_style", "wavy", "one of linear, cosine, constant"),
        ("save", "yes", "a string"),
        ("window_size", "[128, 0]", "a string"),
        ("data_path", "{a: 1}", "a list of strings"),
        ("data_path", "[true]", "a list of strings"),
    ],
)
def test_wrong_types_are_refused_by_key(name, value, expected):
    err = message(replaced(name, value))
    assert f".{name}" in err
    assert f"expected: {expected}" in err


def test_a_single_prefix_need_not_be_a_list():
    text = replaced("data_path", "some/prefix").replace("mock_data: true", "mock_data: false")
    assert config_from_yaml(text).data.data_path == ("some/prefix",)


def test_a_window_and_ways_of_context_parallelism_are_read_from_a_file():
    assert config_from_yaml(replaced("window_size", "8,0")).model.window_size == "8,0"
    text = to_yaml(config_from_yaml(MINIMAL)).replace("  - p2p\n", "  - allgather\n  - a2a\n")
    assert config_from_yaml(text).parallel.cp_comm_type == ("all_gather", "a2a")


def test_a_pattern_of_experts_may_be_a_list_or_the_text_of_one():
    listed, text = (
        config_from_yaml(replaced("moe_layer_freq", value).replace("num_experts: null", "num_experts: 4"))
        for value in ("[0, 1]", "'[0,1]'")
    )
    assert listed == text
    assert listed.model.moe_layer_freq == "[0,1]"
    assert "moe_layer_freq" in message(replaced("moe_layer_freq", "[0, x]"))


def test_several_balancing_types_in_a_file_are_refused_by_name():
    err = message(replaced("moe_router_load_balancing_type", "[aux_loss, seq_aux_loss]"))
    assert "moe_router_load_balancing_type has several values: several balancing types at once" in err


def test_duplicate_keys_are_refused():
    assert "duplicate" in message(with_line("optimizer", "lr: 1e-3")).lower()
    assert "duplicate" in message(MINIMAL + "\ndata: {demo_data: true}\n").lower()


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "${model.num_layers}", "x${", "'???'"])
def test_interpolation_is_refused(value):
    assert "${...}" in message(replaced("save", value))


def test_tags_are_refused_and_never_run(tmp_path):
    target = tmp_path / "made"
    err = message(replaced("save", f"!!python/object/apply:os.mkdir ['{target}']"))
    assert "tag" in err
    assert not target.exists()
    assert "tag" in message(replaced("save", "!other x"))


def test_an_unknown_key_names_the_nearest_and_its_section():
    err = message(with_line("optimizer", "adam_beta_2: 0.9"))
    assert "did you mean adam_beta2 (section optimizer)?" in err
    assert "section optimizer" in err


def test_a_key_in_the_wrong_section_is_told_where_it_belongs():
    assert "lr belongs in section optimizer" in message(with_line("training", "lr: 0.1"))
    assert "lr belongs in section optimizer" in message("lr: 0.1\n" + MINIMAL)


def test_an_unknown_section_names_the_nearest():
    err = message("trainings: {seed: 1}\n" + MINIMAL)
    assert "Unknown section 'trainings'" in err
    assert "did you mean training?" in err
    assert "Unknown section '7'" in message("7: {seed: 1}\n" + MINIMAL)


def test_megatron_names_that_are_no_options_are_explained():
    assert "write activation: swiglu in section model" in message(with_line("model", "swiglu: true"))
    assert "no effect here" in message(with_line("model", "transformer_impl: local"))
    assert "not supported here" in message(with_line("optimizer", "use_torch_fsdp2: true"))


@pytest.mark.parametrize("text", ["", "# only a comment\n", "model:\ndata:\n", "{}"])
def test_an_empty_file_leaves_the_command_line_to_speak(tmp_path, text):
    path = tmp_path / "empty.yaml"
    path.write_text(text)
    line = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    line += " --lr 1e-3 --micro-batch-size 2 --train-iters 5 --mock-data"
    assert load_config(["--config", str(path), *line.split()]) == config_from_yaml(MINIMAL)


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "3", "just words", "model: 3", "model: [1]", "a: [1", "a: b: c", "\t- x"]
)
def test_what_is_no_mapping_of_sections_is_refused(text):
    assert "fix:" in message(text)


def test_unreadable_files_are_refused(tmp_path, capsys):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, reason in ((tmp_path / "absent.yaml", "No such file"), (tmp_path, "directory"), (binary, "utf-8")):
        with pytest.raises(SystemExit) as exit_info:
            parse_or_exit(["--config", str(path)])
        assert exit_info.value.code == 2
        err = capsys.readouterr().err
        assert str(path) in err
        assert reason in err


def test_the_place_of_a_wrong_value_is_the_file_or_the_flag(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(MINIMAL.replace("1e-3", "fast"))
    with pytest.raises(ConfigError, match=r"wrong\.yaml, key optimizer\.lr"):
        load_config(["--config", str(path)])
    with pytest.raises(ConfigError, match="where: --lr\n"):
        load_config(["--lr", "fast"])
