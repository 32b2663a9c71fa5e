"""Convert checkpoints: Hugging Face's folders and Megatron-Core's checkpoints to jmegatron's and back.

    python scripts/convert_checkpoint.py --from hf --to jmegatron --input Llama-3.2-1B --output runs/llama
    python train.py --load runs/llama --finetune --tokenizer-model runs/llama/huggingface/tokenizer.json ...
    python scripts/convert_checkpoint.py --from jmegatron --to hf --input runs/llama --output exported
    python scripts/convert_checkpoint.py --from megatron --to jmegatron --input megatron_run --output runs/a --optimizer

One tensor is in memory at a time, whatever the size of the model. Each line says which tensor went where; each is used
once. A conversion that was killed goes on when it is started again; nothing that is there is overwritten. Options of
train.py behind `--` say what the source does not (a Megatron-Core checkpoint of few arguments needs some).

Exit status: 0 done, 2 the source or an option cannot be used (nothing is left of it), or the disk fails (the next try
goes on).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jmegatron.data.script import run_script
from jmegatron.errors import UsageError

FORMATS = ("hf", "megatron", "jmegatron")
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--from", required=True, choices=FORMATS, dest="source_format", help="format of the input")
    parser.add_argument("--to", required=True, choices=FORMATS, dest="target_format", help="format of the output")
    parser.add_argument("--input", required=True, metavar="PATH", help="folder of the model, or of checkpoints")
    parser.add_argument("--output", required=True, metavar="PATH", help="folder that is written")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="step of a jmegatron input (default: the newest)")
    parser.add_argument("--optimizer", action="store_true", help="with megatron: adam's state as well")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of exported weights (default: the original's, or fp32)")
    parser.add_argument("--original", metavar="PATH", help="to hf: folder whose config.json and tokenizer go along")
    parser.add_argument("--quiet", action="store_true", help="do not print a line for each tensor")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="options of train.py")
    return run_script(lambda: convert(parser.parse_args(arguments)))


def convert(given: argparse.Namespace) -> None:
    """Does what the options say."""
    formats = (given.source_format, given.target_format)
    if formats.count("jmegatron") != 1:
        raise UsageError(
            f"--from {formats[0]} --to {formats[1]}: expected jmegatron to be one of the two; fix: convert to jmegatron"
            " first, then from it"
        )
    if not given.output or Path(given.output).resolve() == Path(given.input).resolve():
        raise UsageError(f"--output {given.output}: expected another folder than --input; fix: give one")
    to_ours = formats[1] == "jmegatron"
    other = formats[0] if to_ours else formats[1]
    for name, fits in (
        ("optimizer", other == "megatron"),
        ("dtype", not to_ours),
        ("original", not to_ours and other == "hf"),
        ("ckpt_step", not to_ours),
        ("options", to_ours),
    ):
        if getattr(given, name) not in (None, False, []) and not fits:
            raise UsageError(
                f"--{name.replace('_', '-')}: has no meaning from {formats[0]} to {formats[1]}; fix: remove it"
            )
    from jmegatron.training import convert as conversions

    say = (lambda line: print(line) if " -> " not in line else None) if given.quiet else print
    dtype = DTYPES.get(given.dtype)
    if to_ours and other == "hf":
        conversions.import_huggingface(given.input, given.output, given.options, say)
    elif to_ours:
        conversions.import_megatron(given.input, given.output, given.options, given.optimizer, say)
    else:
        checkpoint = conversions.find(given.input, given.ckpt_step, say)
        if other == "hf":
            conversions.export_huggingface(checkpoint, given.output, given.original, dtype, say)
        else:
            conversions.export_megatron(checkpoint, given.output, given.optimizer, dtype, say)


if __name__ == "__main__":
    sys.exit(main())
