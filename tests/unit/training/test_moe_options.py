"""What the options of a mixture of experts make of model, mesh and formulas; nothing is compiled."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from compiled_support import program_of
from training_runs import OPTIONS

from jmegatron import partition
from jmegatron.checkpoint.reader import Checkpoint
from jmegatron.config import load_config, resolve
from jmegatron.errors import ConfigError
from jmegatron.optimizer.schedules import START
from jmegatron.planner import formulas
from jmegatron.training.build import formula_shape
from jmegatron.training.resume import Resume, changed_options, check_same_model

CONFIGS = Path(__file__).parents[3] / "configs"
CASES = {
    "plain": "",
    "all": "--swiglu --moe-shared-expert-intermediate-size 16 --moe-router-score-function sigmoid"
    " --moe-router-enable-expert-bias --moe-ffn-hidden-size 24",
    "pattern": "--moe-layer-freq [0]+[1] --disable-bias-linear",
}


def program(words: str, devices: int = 1):
    return program_of([*OPTIONS, "--num-experts", "4", *words.split()], "cpu", devices)


@pytest.mark.parametrize("case", CASES)
def test_the_formulas_count_the_parameters_of_the_model(case):
    built = program(CASES[case])
    parts = formulas.parameters(formula_shape(built.config))
    assert parts.total == partition.num_parameters(built.specs)
    assert parts.experts > 0


def test_a_token_is_multiplied_with_its_own_experts_alone():
    """Mixtral 8x7B: 46.7 billion parameters, of which 12.9 billion compute a token, its embedding's row among them."""
    config = load_config(["--config", str(CONFIGS / "mixtral_8x7b.yaml")])
    shape = formula_shape(resolve(config, 32000, 16))
    assert formulas.parameters(shape).total == pytest.approx(46.7e9, rel=1e-3)
    assert formulas.matmul_parameters(shape) + shape.vocab_rows * shape.hidden_size == pytest.approx(12.9e9, rel=2e-3)


def test_experts_lie_on_ep_and_their_state_on_the_other_data_axes():
    built = program("--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --use-distributed-optimizer", 8)
    assert dict(built.mesh.shape) == dict(pp=1, dp=2, ep=2, cp=1, tp=2)
    experts = built.specs["layers"]["moe"]["experts"]
    assert tuple(experts["up"]["kernel"].spec) == (None, "ep", None, "tp")
    assert tuple(experts["down"]["kernel"].spec) == (None, "ep", "tp", None)
    moment = built.state_shardings.optimizer[0].mu["layers"]["moe"]["experts"]["up"]["kernel"].spec
    divided = [axis for entry in moment for axis in partition.axes_of(entry)]
    assert sorted(divided) == ["cp", "dp", "ep", "tp"]
    whole = program("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", 2)
    kernel = whole.specs["layers"]["moe"]["experts"]["up"]["kernel"]
    assert "tp" not in kernel.spec
    assert kernel.partial_axes == ("tp",)


# ---- going on from a checkpoint -------------------------------------------------------------------------------------
FOUR = "--num-experts 4 --num-layers 4"


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (f"{FOUR} --moe-layer-freq [1,0]*2", f"{FOUR} --moe-layer-freq [0,1]*2", r"give --moe-layer-freq \[1,0\]\*2"),
        (f"{FOUR} --moe-layer-freq [1,0]*2", f"{FOUR} --moe-layer-freq [1,1,0,0]", "moe_layer_freq"),
        (f"{FOUR} --moe-layer-freq [1,0]*2", f"{FOUR} --moe-layer-freq 2", None),
        (FOUR, "--num-experts 8 --num-layers 4", "give --num-experts 4"),
        ("--num-layers 4", FOUR, "leave --num-experts out"),
        (FOUR, "--num-layers 4", "give --num-experts 4"),
        (f"{FOUR} --moe-ffn-hidden-size 24", FOUR, "give --moe-ffn-hidden-size 24"),
        (f"{FOUR} --moe-shared-expert-intermediate-size 16", FOUR, "give --moe-shared-expert-intermediate-size 16"),
        (
            f"{FOUR} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            f"{FOUR} --moe-router-score-function sigmoid",
            "give --moe-router-enable-expert-bias",
        ),
        # No layer has that width.
        (f"{FOUR} --moe-ffn-hidden-size 24 --ffn-hidden-size 64", f"{FOUR} --moe-ffn-hidden-size 24", None),
        (
            f"{FOUR} --moe-ffn-hidden-size 24 --moe-layer-freq 2 --ffn-hidden-size 64",
            f"{FOUR} --moe-ffn-hidden-size 24 --moe-layer-freq 2",
            "give --ffn-hidden-size 64",
        ),
    ],
)
def test_other_experts_than_the_checkpoints_are_refused_by_the_options_name(then, now, expected):
    saved, config = (resolve(load_config([*OPTIONS, *words.split()])) for words in (then, now))
    resume = Resume("folder", Mock(spec=Checkpoint), 0, 0, START, saved, weights_only=True)
    if expected is None:
        check_same_model(config, resume)
        assert not [line for line in changed_options(config, saved, ["model"]) if "experts" in line or "freq" in line]
    else:
        with pytest.raises(ConfigError, match=expected):
            check_same_model(config, resume)
