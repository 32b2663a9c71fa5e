"""What the options of a mixture of experts make of model, mesh and formulas; nothing is compiled."""

from pathlib import Path

import pytest
from compiled_support import program_of
from training_runs import OPTIONS

from jmegatron import partition
from jmegatron.config import load_config, resolve
from jmegatron.planner import formulas
from jmegatron.training.build import formula_shape

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
