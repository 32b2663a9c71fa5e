"""Times the feeding of batches, the building of sample indices and of blends; no communication, one device.

    python scripts/benchmark_data.py feed  [--tokens N]      # tokens/s on the device against a plain read, in one run
    python scripts/benchmark_data.py wait                    # share of a 25M-parameter step spent waiting for data
    python scripts/benchmark_data.py index [--documents N]   # seconds and memory of a sample index
    python scripts/benchmark_data.py blend [--samples N]     # seconds and memory of a blend's order

feed: a made-up corpus in a temporary folder, samples of 4096 tokens. The contenders take turns: "read" copies the same
`.bin` from its start to its end through a fresh memory map into one small buffer, which stays in the processor's
caches; "read, new memory" copies it into one new array of its size; the others are the loader of the training loop,
shuffled samples up to arrays on the device, with `--num-workers` 0 (built and placed inline), 1 and 2. The file is in
the page cache for all, or for none with `--cold` (each turn asks the system to drop it first).
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jmegatron.config import load_config
from jmegatron.data.blend import build_blend_index, normalised
from jmegatron.data.gpt_dataset import GPTDataset
from jmegatron.data.gpt_index import GPTIndex, build_gpt_index, gpt_index_fits
from jmegatron.data.index_cache import content_key, load_or_build
from jmegatron.data.indexed_dataset import IndexedDataset, bin_path, idx_path, write_index
from jmegatron.data.loader import GlobalBatchLoader
from jmegatron.training.program import Program, build_program, resolve_for_run

SEQ_LEN, VOCAB = 4096, 50_000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and prints its table; returns the exit status."""
    parser = argparse.ArgumentParser(description="Times the data part.")
    parser.add_argument("what", choices=["feed", "wait", "index", "blend"])
    parser.add_argument("--tokens", type=int, default=200_000_000, help="feed: size of the corpus")
    parser.add_argument("--mean-length", type=int, default=2000, help="feed: mean tokens per document")
    parser.add_argument("--dtype", choices=["uint16", "int32"], default="uint16", help="feed: of the corpus")
    parser.add_argument("--batch-size", type=int, default=256, help="feed: samples of a global batch")
    parser.add_argument("--documents", type=int, default=5_000_000, help="index: of 2000 tokens on average")
    parser.add_argument("--seq-length", type=int, default=SEQ_LEN, help="index: tokens per sample")
    parser.add_argument("--samples", type=int, default=100_000_000, help="blend: length")
    parser.add_argument("--corpora", type=int, default=3, help="blend: number")
    parser.add_argument("--rounds", type=int, default=3, help="feed: turns of each contender")
    parser.add_argument("--cold", action="store_true", help="feed: from the disk instead of the page cache")
    parser.add_argument("--steps", type=int, default=20, help="wait: steps that are timed")
    options = parser.parse_args(argv)
    {"feed": feed, "wait": wait, "index": index, "blend": blend}[options.what](options)
    return 0


def random_lengths(documents: int, mean: int) -> np.ndarray:
    """Returns int32 document lengths with a long tail, at least 1 each."""
    lengths = np.random.RandomState(0).exponential(mean, size=documents)
    return np.maximum(lengths, 1).astype(np.int32)


def peak_gib() -> float:
    """Returns the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# ---- feeding ------------------------------------------------------------------------------------------------------
def make_corpus(prefix: Path, tokens: int, mean: int, dtype: str) -> IndexedDataset:
    """Writes a corpus of random tokens."""
    lengths = random_lengths(tokens // mean, mean)
    rng = np.random.RandomState(1)
    with open(bin_path(prefix), "wb") as file:
        for chunk in np.array_split(lengths, max(1, tokens // 10_000_000)):
            file.write(rng.randint(0, VOCAB, size=int(chunk.sum())).astype(dtype).data)
    with open(idx_path(prefix), "wb") as file:
        write_index(file, dtype, lengths, np.arange(len(lengths) + 1))
    return IndexedDataset(prefix)


def read(prefix: Path, dtype: str) -> float:
    """Returns tokens/s of copying the token file through a fresh memory map into a buffer of 64 samples."""
    start = time.perf_counter()
    tokens = np.memmap(bin_path(prefix), dtype=dtype, mode="r")
    buffer = np.empty(64 * SEQ_LEN, dtype)
    for at in range(0, len(tokens), len(buffer)):
        part = tokens[at : at + len(buffer)]
        buffer[: len(part)] = part
    return len(tokens) / (time.perf_counter() - start)


def read_new_memory(prefix: Path, dtype: str) -> float:
    """Returns tokens/s of copying the token file through a fresh memory map into one new array."""
    start = time.perf_counter()
    tokens = np.array(np.memmap(bin_path(prefix), dtype=dtype, mode="r"))
    return len(tokens) / (time.perf_counter() - start)


def forget(prefix: Path) -> None:
    """Asks the system to drop the token file from its page cache."""
    with open(bin_path(prefix), "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fed(program: Program, dataset: GPTDataset, batch_size: int, num_workers: int) -> float:
    """Returns tokens/s of the training loop's loader, up to arrays on the device."""
    start = time.perf_counter()
    batches = 0
    with GlobalBatchLoader(
        dataset, batch_size, rows=program.placer.rows, place=program.put, num_workers=num_workers
    ) as loader:
        for batch in loader:
            jax.block_until_ready(batch)
            batches += 1
    return batches * batch_size * SEQ_LEN / (time.perf_counter() - start)


def dataset_of(prefix: Path) -> GPTDataset:
    """Returns one epoch of a corpus."""
    corpus = IndexedDataset(prefix)
    return GPTDataset(corpus, (0, len(corpus)), None, SEQ_LEN, 1234, vocab_size=VOCAB)


def program_of(layers: str, seq: int, batch: int, vocab: int, micro: int) -> Program:
    """Returns the program of a GPT on one device."""
    words = (
        f"{layers} --seq-length {seq} --max-position-embeddings {seq} --vocab-size {vocab} --micro-batch-size {micro} "
        f"--global-batch-size {batch} --lr 1e-3 --train-iters 1000 --mock-data --hidden-dropout 0 --attention-dropout 0"
    )
    config, _ = resolve_for_run(load_config(words.split()), 1)
    return build_program(config, jax.devices()[:1])


def feed(options: argparse.Namespace) -> None:
    """Prints tokens/s of each contender and its ratios to both reads."""
    size = options.batch_size
    program = program_of("--num-layers 1 --hidden-size 64 --num-attention-heads 4", SEQ_LEN, size, VOCAB, size)
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        make_corpus(prefix, options.tokens, options.mean_length, options.dtype)

        # Opened anew each time: pages that are mapped stay in the cache.
        def loader(num_workers: int) -> Callable[[], float]:
            return lambda: fed(program, dataset_of(prefix), size, num_workers)

        contenders: dict[str, Callable[[], float]] = {
            "read": lambda: read(prefix, options.dtype),
            "read, new memory": lambda: read_new_memory(prefix, options.dtype),
            **{f"loader, {n} workers": loader(n) for n in (0, 1, 2)},
        }
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(options.rounds + 1):  # the first turn warms up
            for name, run in contenders.items():
                if options.cold:
                    forget(prefix)
                speed = run()
                if turn:
                    speeds[name].append(speed)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    print(f"{'cold: ' if options.cold else ''}{options.dtype} corpus of {options.tokens:.2g} tokens, ", end="")
    print(f"documents of {options.mean_length} tokens on average, global batch {size}")
    print("| contender | tokens/s, median | best | ratio of medians to read | to read, new memory |")
    print("| --- | --- | --- | --- | --- |")
    for name, median in medians.items():
        ratios = [f"{median / medians[other]:.2f}" for other in ("read", "read, new memory")]
        print(f"| {name} | {median / 1e6:.0f} M | {max(speeds[name]) / 1e6:.0f} M | {ratios[0]} | {ratios[1]} |")


# ---- waiting ------------------------------------------------------------------------------------------------------
def wait(options: argparse.Namespace) -> None:
    """Prints the part of the steps' time that the loop waits for its batch, with and without threads."""
    model = "--num-layers 6 --hidden-size 512 --num-attention-heads 8"
    program = program_of(model, 256, 4, 12288, 4)
    state = program.init()
    step = program.train_step().lower(state, program.abstract_batch(), None).compile()
    print("| --num-workers | ms a step | ms waiting | share |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "corpus", 2_000_000, 300, "uint16")
        dataset = GPTDataset(corpus, (0, len(corpus)), 4 * (options.steps + 2), 256, 1234)
        for num_workers in (0, 1, 2):
            state, seconds, waited = _steps(program, step, state, dataset, num_workers, options.steps)
            print(f"| {num_workers} | {seconds * 1e3:.0f} | {waited * 1e3:.3f} | {waited / seconds:.4%} |", flush=True)


def _steps(
    program: Program, step: Any, state: Any, dataset: GPTDataset, num_workers: int, count: int
) -> tuple[Any, float, float]:
    """Returns (state, mean seconds of a step, mean seconds of them spent in `next`), the first two steps left out."""
    waited = start = 0.0
    loader = GlobalBatchLoader(dataset, 4, rows=program.placer.rows, place=program.put, num_workers=num_workers)
    with loader:
        for number in range(count + 2):
            if number == 2:
                waited, start = 0.0, time.perf_counter()
            before = time.perf_counter()
            batch = next(loader)
            waited += time.perf_counter() - before
            # The tokens of the made-up corpus exceed the vocabulary; only the time matters.
            state, metrics = step(state, batch, None)
            jax.block_until_ready(metrics)
        seconds = (time.perf_counter() - start) / count
    return state, seconds, waited / count


# ---- indices ------------------------------------------------------------------------------------------------------
def index(options: argparse.Namespace) -> None:
    """Prints seconds and peak memory of building, storing and reading a sample index."""
    lengths = random_lengths(options.documents, 2000)
    before = peak_gib()
    key = content_key({"benchmark": options.seq_length}, lengths)
    with tempfile.TemporaryDirectory() as folder:

        def build() -> Any:
            return build_gpt_index(lengths, 0, len(lengths), None, options.seq_length, 1234)

        def fits(index: GPTIndex) -> bool:
            return gpt_index_fits(index, lengths, 0, len(lengths))

        start = time.perf_counter()
        built = build()
        seconds = time.perf_counter() - start
        del built
        start = time.perf_counter()
        load_or_build(folder, key, GPTIndex, build, fits)
        stored = time.perf_counter() - start
        start = time.perf_counter()
        found = load_or_build(folder, key, GPTIndex, build, fits)
        read = time.perf_counter() - start
        print(
            f"{lengths.sum(dtype=np.int64):.4g} tokens, {len(lengths)} documents, seq {options.seq_length}: "
            f"{len(found.shuffle_index)} samples; build {seconds:.1f} s, build and store {stored:.1f} s, read "
            f"{read:.2f} s; peak {peak_gib():.2f} GiB ({before:.2f} GiB before)"
        )


def blend(options: argparse.Namespace) -> None:
    """Prints seconds and peak memory of a blend's order."""
    weights = normalised(np.random.RandomState(0).random_sample(options.corpora).tolist())
    before, start = peak_gib(), time.perf_counter()
    build_blend_index(weights, options.samples)
    seconds = time.perf_counter() - start
    print(
        f"{options.samples} samples of {options.corpora} corpora: {seconds:.1f} s, peak {peak_gib():.2f} GiB "
        f"({before:.2f} GiB before)"
    )


if __name__ == "__main__":
    sys.exit(main())
