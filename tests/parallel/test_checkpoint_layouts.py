"""A checkpoint holds the same arrays whatever the mesh, and any mesh takes them: bit for bit, whole on no device.

The truth is a checkpoint drawn by numpy; states are put together from it, and taken apart, by numpy alone.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from compiled_support import program_of
from support import at_places
from tolerances import RESUMED_LOSS_RELATIVE
from training_runs import saved_arrays, train

from jmegatron import partition
from jmegatron.checkpoint import reader
from jmegatron.checkpoint.manifest import read_manifest
from jmegatron.checkpoint.writer import CheckpointWriter
from jmegatron.planner import hlo
from jmegatron.planner.hlo_text import leaves
from jmegatron.planner.topology import compile_for
from jmegatron.training.program import Program
from jmegatron.training.state import named_arrays

RUN = (
    "--num-layers 8 --hidden-size 40 --ffn-hidden-size 56 --num-attention-heads 4 --kv-channels 10 --seq-length 16"
    " --max-position-embeddings 44 --micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --train-iters 3 --eval-iters 0"
    " --mock-data --hidden-dropout 0 --attention-dropout 0 --log-interval 1"
    # 65 rows on one device, 70 on two, 80 on four, and so on.
    " --vocab-size 61 --make-vocab-size-divisible-by 5"
)
MODELS = {
    "gpt2": "",
    "llama": "--untie-embeddings-and-output-weights --normalization RMSNorm --swiglu --disable-bias-linear"
    " --position-embedding-type rope --group-query-attention --num-query-groups 4 --bf16",
    "fp16": "--fp16",
}
SIZES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "v": "num-virtual-stages-per-pipeline-rank",
    "cp": "context-parallel-size",
    "first": "decoder-first-pipeline-num-layers",
}
SHARDED = "--use-distributed-optimizer"
ALL = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, named by its sizes: "tp2 pp2"; `devices` that are left over are dp."""

    sizes: str
    devices: int
    options: str = ""

    @property
    def words(self) -> list[str]:
        pairs = ((word.rstrip("0123456789"), word.lstrip("abcdefghijklmnopqrstuvwxyz")) for word in self.sizes.split())
        return [*(word for name, size in pairs for word in (f"--{SIZES[name]}", size)), *self.options.split()]

    def __str__(self) -> str:
        options = {"": "", SHARDED: " sharded", ALL: " all", "--sequence-parallel": " sequence"}
        return f"{self.sizes or 'dp'}{options[self.options]} on {self.devices}".replace(" ", "-")


ONE = Layout("", 1)
MIXED = Layout("tp2 pp2 v2", 8, SHARDED)
UNEVEN = Layout("tp2 pp2 first3", 4)
QUICK = [ONE, MIXED, UNEVEN]
LAYOUTS = [
    *QUICK,
    Layout("tp4", 4, "--sequence-parallel"),
    Layout("pp4 v2", 4),
    Layout("cp2 tp2", 8),
    Layout("cp2", 8, ALL),
    Layout("pp2 cp2", 8, SHARDED),
    Layout("", 8, SHARDED),
    Layout("pp4 first5", 8, ALL),
]
CASES = [
    pytest.param("gpt2", QUICK, id="gpt2-quick"),
    pytest.param("gpt2", LAYOUTS, id="gpt2", marks=pytest.mark.slow),
    pytest.param("llama", LAYOUTS, id="llama", marks=pytest.mark.slow),
    pytest.param("fp16", QUICK, id="fp16", marks=pytest.mark.slow),
]


@functools.cache
def program(model: str, layout: Layout) -> Program:
    return program_of([*RUN.split(), *MODELS[model].split(), *layout.words], "cpu", layout.devices)


# ---- by hand --------------------------------------------------------------------------------------------------------
def drawn_checkpoint(program: Program) -> dict[str, np.ndarray]:
    """Random numbers, signed zeros, infinities, NaNs and a subnormal, in the arrays of a checkpoint."""
    arrays = {}
    for number, (name, a) in enumerate(sorted(program.saved_layout().items())):
        rng = np.random.default_rng(number)
        if not np.issubdtype(a.dtype, np.floating):
            arrays[name] = np.asarray(rng.integers(0, 1000, a.shape), a.dtype)
            continue
        arrays[name] = np.asarray(rng.normal(size=a.shape), a.dtype)
        if a.size > 8:
            arrays[name].reshape(-1)[[0, 1, 2, 3, -1]] = [-0.0, np.inf, -np.inf, np.nan, 1e-40]
    return arrays


def by_hand(program: Program, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of the state that a checkpoint stands for, by name."""
    specs = dict(partition.named_specs(program.specs))
    mixed = any(name.startswith("master/") for name in named_arrays(program.state_shardings))
    state = {}
    for name, a in named_arrays(program.abstract_state()).items():
        value = arrays[name.replace("master/", "parameters/", 1)]
        path = next((path for path in specs if name.endswith(f"/{path}")), None)
        if path is not None:
            value = at_places(specs[path], padded(specs[path], value))
        state[name] = value.astype(a.dtype) if mixed and name.startswith("parameters/") else value
        assert (state[name].shape, state[name].dtype) == (a.shape, a.dtype), name
    return state


def padded(spec: partition.ParameterSpec, value: np.ndarray) -> np.ndarray:
    """The rows of the vocabulary with those of zeros that follow."""
    if spec.padded is None:
        return value
    dim, count = spec.padded
    assert value.shape[dim] == count == 61
    widths = [(0, 0)] * value.ndim
    widths[dim] = (0, spec.shape[dim] - count)
    return np.pad(value, widths)


def assert_equal_bits(got: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        found = np.asarray(got[name])
        assert (found.shape, found.dtype) == (value.shape, value.dtype), name
        assert found.tobytes() == np.ascontiguousarray(value).tobytes(), name


# ---- every array ----------------------------------------------------------------------------------------------------
META = {
    "step": 7,
    "consumed_samples": 0,
    "schedule_position": {"updates": 0, "samples": 0},
    "config": "",
    "versions": {},
    "random_keys": {},
}


@pytest.mark.parametrize(("model", "layouts"), CASES)
def test_every_layout_saves_the_same_arrays_and_takes_those_of_every_other_bit_for_bit(
    model: str, layouts: list[Layout], tmp_path: Path
) -> None:
    truth = drawn_checkpoint(program(model, ONE))
    records = []
    for number, layout in enumerate(layouts):
        here = program(model, layout)
        shardings = named_arrays(here.state_shardings)
        values = {name: jax.device_put(value, shardings[name]) for name, value in by_hand(here, truth).items()}
        state = jax.tree.unflatten(jax.tree.structure(here.state_shardings), list(values.values()))
        writer = CheckpointWriter(str(tmp_path / str(number)), in_background=False)
        writer.save(7, here.saved_arrays(state), META)
        assert [outcome.problem for outcome in writer.outcomes()] == [""]
        assert_equal_bits(saved_arrays(tmp_path / str(number), 7), truth)
        records.append(read_manifest(tmp_path / str(number) / "7").arrays)
        # Shapes, dtypes and checksums of the manifest do not depend on the mesh either.
        assert records[-1] == records[0]
    for layout in layouts:
        here = program(model, layout)
        for other in range(len(layouts)):
            checkpoint, _ = reader.find(str(tmp_path / str(other)))
            assert checkpoint is not None
            arrays = checkpoint.read(here.saved_layout())
            assert_equal_bits(arrays, truth)
            assert {n: a.sharding for n, a in arrays.items()} == {n: a.sharding for n, a in here.saved_layout().items()}
        state = here.state_of(arrays)
        assert_equal_bits(named_arrays(state), by_hand(here, truth))
        assert jax.tree.map(lambda a: a.sharding, state) == here.state_shardings, layout


def test_the_padding_of_the_vocabulary_differs_between_these_layouts() -> None:
    rows = {program("gpt2", layout).specs["embedding"]["word"]["embedding"].shape[0] for layout in LAYOUTS}
    assert rows == {65, 70, 80}


# ---- whole on no device ---------------------------------------------------------------------------------------------
def whole_sizes(arrays: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """(elements, name) of each array that is divided."""
    for name, a in arrays.items():
        if not a.sharding.is_fully_replicated:
            yield math.prod(a.shape), name


def results_as_large_as_a_whole_leaf(program: Program, compiled: Any) -> list[str]:
    """Instructions, however small the part of the program, with a result that has the elements of a whole leaf."""
    specs = dict(partition.named_specs(program.specs))
    # What the mesh does not change is not touched; a norm's few numbers are as many as a part of something else.
    moved = [path for path, spec in specs.items() if not partition.is_canonical(spec)]
    assert len(moved) >= 13
    both = [named_arrays(program.abstract_state()), program.saved_layout()]
    touched = [{n: a for n, a in arrays.items() if n.endswith(tuple(moved))} for arrays in both]
    whole = {size: name for arrays in touched for size, name in whole_sizes(arrays)}
    parts = {math.prod(a.sharding.shard_shape(a.shape)) for arrays in touched for a in arrays.values()}
    assert not parts & whole.keys(), "choose sizes that tell parts and wholes apart"
    return [
        f"{instruction.opcode} {shape}: {whole[shape.size]}"
        for instruction, _ in hlo.walk(hlo.load(compiled))
        for shape in leaves(instruction.shape)
        if shape.size in whole
    ]


TARGETS = ["cpu", pytest.param("h100", marks=pytest.mark.gpu_compiler)]
WAYS = {
    "replicated": "",
    "sharded": SHARDED,
    "sharded_bf16": f"{SHARDED} --bf16",
    "all_untied": f"{ALL} --untie-embeddings-and-output-weights --bf16",
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # of what gets padding
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_no_device_holds_a_whole_divided_array_while_a_state_is_saved_or_restored(options: str, target: str) -> None:
    words = RUN.replace("--num-layers 8", "--num-layers 12").split()
    sizes = dataclasses.replace(MIXED, options=options)
    here = program_of([*words, *sizes.words], target, 8)
    assert dict(here.mesh.shape) == {"pp": 2, "dp": 2, "ep": 1, "cp": 1, "tp": 2}
    state = here.abstract_state()
    saved = jax.tree.unflatten(
        jax.tree.structure(jax.eval_shape(here._to_saved, state)), list(here.saved_layout().values())
    )
    for way, argument in ((here._jitted_to_saved, state), (here._jitted_from_saved, saved)):
        assert results_as_large_as_a_whole_leaf(here, compile_for(way, argument)) == []


# ---- going on -------------------------------------------------------------------------------------------------------
NEXT = [ONE, Layout("cp2 tp2", 4), UNEVEN]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder with step 2 of 3, saved at MIXED, and the losses of the whole run."""
    folder = tmp_path_factory.mktemp("stopped")
    save = ("--save", str(folder / "save"), "--save-interval", "2")
    run = train(folder, *MIXED.words, *save, devices=8, defaults=RUN.split())
    return folder / "save", run.losses


@pytest.mark.parametrize("layout", [MIXED, *(pytest.param(a, marks=pytest.mark.slow) for a in NEXT)], ids=str)
def test_the_next_steps_loss_is_that_of_the_run_that_did_not_stop(
    layout: Layout, stopped: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, losses = stopped
    options = ("--load", str(folder), "--ckpt-step", "2")
    run = train(tmp_path, *layout.words, *options, devices=layout.devices, defaults=RUN.split())
    assert list(run.steps) == [3]
    relative = 0.0 if layout == MIXED else RESUMED_LOSS_RELATIVE
    assert run.losses == pytest.approx(losses[2:], rel=relative, abs=0.0)
