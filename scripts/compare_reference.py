"""Compare a model with a reference: logits, loss, every gradient, optimizer steps; layer by layer with --per-layer.

    python scripts/compare_reference.py --reference recorded RECORDINGS --config model.yaml
    python scripts/compare_reference.py --reference transformers --hf-folder Llama-3.2-1B --per-layer
    python scripts/compare_reference.py --reference megatron --config model.yaml --weights runs/a --num-steps 5

Both sides get the same weights and tokens. The reference is

    recorded DIR    what Megatron-Core once computed: weights.safetensors, forward.npz, grads.safetensors, ...
    transformers    Hugging Face transformers on the CPU (pip install jmegatron[hf] jmegatron[torch])
    megatron        Megatron-Core on the CPU (pip install --no-deps megatron-core)

Every other option is one of train.py: the model, --bf16, and the layout that ours runs under (--num-cpu-devices makes
virtual devices). Without --config, the options of the model are those of the weights, as far as they say them.
Dropout and label smoothing are off. An error is the largest difference over the reference's largest value.

Exit status: 0 equal within the tolerances, 1 not (the worst is named), 2 an option or a file cannot be used.
"""

import argparse
import math
import sys
from collections.abc import Sequence

from jmegatron.data.script import run_script
from jmegatron.errors import UsageError

TOLERANCES = {
    "logits": "1e-5",
    "loss": "1e-5",
    "gradients": "1e-4",
    "activations": "1e-5",
    "weights": "absolute, of trained ones: 1 %% of a step at the largest learning rate",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--reference", required=True, nargs="+", metavar=("KIND", "DIR"), help="recorded DIR, transformers, or megatron"
    )
    parser.add_argument("--hf-folder", metavar="DIR", help="model of transformers: config.json and safetensors")
    parser.add_argument(
        "--weights",
        metavar="DIR",
        help="checkpoint of jmegatron or Megatron-Core (torch_dist), or a model of Hugging Face (default: the"
        " reference's own; random ones with megatron)",
    )
    parser.add_argument("--weights-step", type=int, metavar="N", help="step of a jmegatron checkpoint (the newest)")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices of ours (default: as many as its layout needs)"
    )
    parser.add_argument(
        "--num-sequences", type=int, metavar="N", help="of the batch (default: two a data-parallel rank)"
    )
    parser.add_argument(
        "--num-steps", type=int, metavar="N", help="of the optimizer (default: the recorded ones, else none)"
    )
    parser.add_argument("--per-layer", action="store_true", help="compare activations, and name where they part")
    parser.add_argument("--forward-only", action="store_true", help="neither gradients nor optimizer steps")
    parser.add_argument("--all", action="store_true", help="print every leaf, not only the worst")
    for name, default in TOLERANCES.items():
        parser.add_argument(f"--{name}-tolerance", type=float, metavar="X", help=f"(default: {default})")
    given, rest = parser.parse_known_args(arguments)
    failures: list[bool] = []
    status = run_script(lambda: failures.append(run(given, rest)))
    return status or int(any(failures))


def run(given: argparse.Namespace, rest: Sequence[str]) -> bool:
    """Runs the comparison, prints it, and returns whether something is above its tolerance."""
    kind, folder = check(given)
    # After the checks: a wrong option must not wait for jax to load.
    from jmegatron.training import compare_reference

    tolerances = {name: getattr(given, f"{name}_tolerance") for name in TOLERANCES}
    request = compare_reference.Request(
        reference=kind,
        folder=folder,
        options=rest,
        weights=given.weights,
        weights_step=given.weights_step,
        devices=given.devices,
        num_sequences=given.num_sequences,
        num_steps=given.num_steps,
        per_layer=given.per_layer,
        forward_only=given.forward_only,
        tolerances={name: value for name, value in tolerances.items() if value is not None},
    )
    rows = compare_reference.Comparison(request, print).rows()
    for line in [*compare_reference.table(rows, show_all=given.all), *compare_reference.verdict(rows)]:
        print(line)
    return any(row.above for row in rows)


def check(given: argparse.Namespace) -> tuple[str, str | None]:
    """Returns (kind of reference, its folder).

    Raises:
      UsageError: an option is wrong, or has no meaning beside the others.
    """
    kind, *folders = given.reference
    if kind not in ("recorded", "transformers", "megatron"):
        raise UsageError(
            f"--reference: got {kind!r}, expected recorded DIR, transformers or megatron; fix: one of them"
        )
    if len(folders) != (kind == "recorded"):
        raise UsageError(
            f"--reference {kind}: got {len(folders)} folders, expected {'one' if kind == 'recorded' else 'none'}; fix:"
            + (" --reference recorded DIR" if kind == "recorded" else " --weights or --hf-folder name folders")
        )
    if (given.hf_folder is not None) != (kind == "transformers"):
        what = "is needed" if kind == "transformers" else "has no meaning"
        raise UsageError(f"--hf-folder: {what} with --reference {kind}; fix: give it with transformers, and only there")
    fixed = {"num_sequences": kind == "recorded", "num_steps": given.forward_only}
    for name, least in (("devices", 1), ("num_sequences", 1), ("num_steps", 0), ("weights_step", 0)):
        value, flag = getattr(given, name), f"--{name.replace('_', '-')}"
        if value is not None and value < least:
            raise UsageError(f"{flag}: got {value}, expected at least {least}; fix: another number")
        if value is not None and fixed.get(name):
            why = "the recorded batch has its own" if name == "num_sequences" else "--forward-only does none"
            raise UsageError(f"{flag}: has no meaning here: {why}; fix: remove it")
    for name in TOLERANCES:
        value = getattr(given, f"{name}_tolerance")
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(
                f"--{name}-tolerance: got {value}, expected at least 0, and finite; fix: give a number such as 1e-5"
            )
    if given.weights_step is not None and given.weights is None:
        raise UsageError("--weights-step: has no meaning without --weights; fix: give the folder of the checkpoint")
    return kind, folders[0] if folders else given.hf_folder


if __name__ == "__main__":
    sys.exit(main())
