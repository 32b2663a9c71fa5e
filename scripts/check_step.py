"""Compare one step under two layouts: loss, gradient norm and the gradient of every parameter.

    python scripts/check_step.py --config configs/tp2.yaml --against configs/pp2.yaml
    python scripts/check_step.py --config configs/tp2.yaml --against configs/pp2.yaml --num-layers 4 --demo-data

Every other option is one of train.py and applies to both files. Model, data and batch have to be the same; degrees,
schedule, recomputation and precision may differ. A layout uses the first devices, as many as its --num-cpu-devices
says, else all that there are. Both start from the first layout's weights, those of --load or of the seed, and take its
first batch; each is compiled by itself. "at" is the index of the largest difference, its first number that of the layer
where layers have the parameter.

Exit status: 0 equal within the tolerances, 1 not (the worst parameter is named), 2 an option or a file cannot be used.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jmegatron.config import Config, load_config
from jmegatron.data.script import run_script
from jmegatron.errors import ConfigError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(
        description="Compare one step under two layouts.",
        epilog="Every other option is one of train.py and applies to both files.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the first layout")
    parser.add_argument("--against", required=True, metavar="FILE", help="the second one")
    parser.add_argument("--devices", type=int, metavar="N", help="devices of the first (default: --num-cpu-devices)")
    parser.add_argument("--against-devices", type=int, metavar="N", help="devices of the second")
    parser.add_argument(
        "--loss-tolerance", type=float, default=1e-5, metavar="X", help="relative (default: 1e-5, for float32)"
    )
    parser.add_argument(
        "--gradient-tolerance",
        type=float,
        default=1e-4,
        metavar="X",
        help="largest difference over largest value of each gradient (default: 1e-4, for float32)",
    )
    given, rest = parser.parse_known_args(arguments)
    failures: list[str] = []
    status = run_script(lambda: failures.extend(check(given, rest)))
    return status or (1 if failures else 0)


def check(given: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Runs both steps, prints the comparison, and returns what is above its tolerance."""
    for name in ("loss_tolerance", "gradient_tolerance"):
        if not getattr(given, name) >= 0:
            raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(given, name)}, expected at least 0")
    paths = (given.config, given.against)
    configs = [read(path, rest) for path in paths]
    # After parsing: a wrong option must not wait for jax to load.
    from jmegatron.training import compare

    programs, weights, arrays = prepare(configs, (given.devices, given.against_devices), paths)
    note = compare.averaging_note(programs[0].config, programs[1].config, arrays)
    if note:
        print(note)
    results = []
    for path, program in zip(paths, programs, strict=True):
        print(layout_line(path, program), flush=True)
        results.append(compare.run_step(program, weights, arrays))
    return report(results, compare.layer_numbers(programs[0].specs), given)


def read(path: str, rest: Sequence[str]) -> Config:
    """Returns the config of one file and the options that apply to both."""
    try:
        return load_config(["--config", path, *rest])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def prepare(
    configs: Sequence[Config], counts: Sequence[int | None], paths: Sequence[str]
) -> tuple[list[Any], Any, dict[str, Any]]:
    """Returns (the two programs, the weights and the batch that both get)."""
    from jmegatron.training import compare, startup
    from jmegatron.training.resume import check_same_model, find_checkpoint, keep_padding, load_state

    startup.configure_devices(max(configs, key=lambda config: config.hardware.num_cpu_devices or 0))
    resume = find_checkpoint(configs[0].checkpoint, print)
    first = keep_padding(configs[0], resume) if resume else configs[0]
    built = [build(*layout) for layout in zip((first, configs[1]), counts, paths, strict=True)]
    programs = [program for program, _ in built]
    compare.check_same_step(*(program.config for program in programs))
    if resume:
        check_same_model(programs[0].config, resume)
    for program in programs:
        startup.check_memory(program.specs, program.config, program.mesh)
    arrays = first_batch(*built[0])
    weights = compare.start_weights(programs[0], load_state(programs[0], resume, print) if resume else None)
    return programs, weights, arrays


def build(config: Config, count: int | None, path: str) -> tuple[Any, Any]:
    """Returns (program, tokenizer) of one layout."""
    from jmegatron.training.program import build_program, resolve_for_run

    try:
        devices = devices_of(config, count)
        config, tokenizer = resolve_for_run(config, len(devices))
        return build_program(config, devices), tokenizer
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def first_batch(program: Any, tokenizer: Any) -> dict[str, Any]:
    """Returns the arrays of a run's first global batch."""
    from jmegatron.data.loader import build_global_batch
    from jmegatron.training.samples import build_data

    config = program.config
    # Nothing is evaluated: a corpus without validation documents will do.
    training = dataclasses.replace(config.training, eval_iters=0)
    source = build_data(dataclasses.replace(config, training=training), tokenizer)[0]
    assert source is not None, "build_data refuses a run without training samples"
    return build_global_batch(source, 0, training.global_batch_size, program.sample_order(len(source)))


def devices_of(config: Config, count: int | None) -> list[Any]:
    """Returns the first devices, as many as asked for."""
    import jax

    found = jax.devices()
    if count is None:
        count = config.hardware.num_cpu_devices or len(found)
    if not 0 < count <= len(found):
        raise UsageError(
            f"devices of a layout: got {count}, expected 1 to {len(found)}, as many as there are; fix: change --devices"
            f" or --against-devices; --num-cpu-devices {max(count, 1)} makes virtual ones"
        )
    return found[:count]


def layout_line(path: str, program: Any) -> str:
    """Returns what the output says about one layout."""
    settings = program.settings
    mesh = ", ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items())
    more = [f"{program.num_microbatches} micro-batches", np.dtype(settings.compute_dtype).name]
    if settings.parallel.sequence_parallel:
        more.append("sequence parallel")
    if program.mesh.shape["pp"] > 1:
        more.append(str(program.config.parallel.pipeline_schedule))
    return f"{path}: mesh {mesh}; {', '.join(more)}"


def report(results: Sequence[Any], layers: Mapping[str, Sequence[int]], given: argparse.Namespace) -> list[str]:
    """Prints the comparison, and returns what is above its tolerance, the worst parameter first."""
    from jmegatron.training import compare

    one, two = results
    rows = compare.compare_gradients(one.gradients, two.gradients, layers)
    width = max(len(row.path) for row in rows)
    print(f"\n{'':{width}}  {'relative':>9}  {'first':>13}  {'second':>13}")
    failures = []
    for name, tolerance in (("loss", given.loss_tolerance), ("grad_norm", given.gradient_tolerance)):
        values = getattr(one, name), getattr(two, name)
        error = compare.relative(*values)
        print(f"{name.replace('_', ' '):{width}}  {error:9.2e}  {values[0]:13.7g}  {values[1]:13.7g}")
        if error > tolerance:
            failures.append(f"{name.replace('_', ' ')} {error:.2e} (tolerance {tolerance:g})")
    print(f"\n{'gradient, worst first':{width}}  {'error':>9}  {'largest':>13}  at")
    for row in rows:
        print(f"{row.path:{width}}  {row.error:9.2e}  {row.largest:13.7g}  {list(row.place)}")
    above = [row for row in rows if row.error > given.gradient_tolerance]
    if above:
        more = f" and {len(above) - 1} more" if len(above) > 1 else ""
        failures.insert(0, f"gradient of {above[0].path} {above[0].error:.2e}{more} ({given.gradient_tolerance:g})")
    worst = f"worst gradient: {rows[0].path}, {rows[0].error:.2e}"
    print(f"\n{worst}\n" + ("above tolerance: " + "; ".join(failures) if failures else "equal within the tolerances"))
    return failures


if __name__ == "__main__":
    sys.exit(main())
