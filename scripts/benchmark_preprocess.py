"""Measure preprocessing: workers against one, against the tokenizer alone, and memory over a large input.

    python scripts/benchmark_preprocess.py --megabytes 200
    python scripts/benchmark_preprocess.py --megabytes 1000 --workers 2 --only memory

The text is a JSON lines file made from the Python standard library's sources, in documents of about 3 kB. Each line of
the report is a measurement; `CPU s` adds up the parent and the workers, which tells on a busy machine whether more
workers cost more work: with none lost, the seconds of 2 workers are half as many wherever two cores are free.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jmegatron.data.demo_corpus import demo_documents
from jmegatron.data.preprocess import PreprocessOptions, preprocess
from jmegatron.data.tokenizers import Tokenizer, build_tokenizer, tokenizer_settings
from jmegatron.data.tokenizers.command_line import add_tokenizer_arguments
from jmegatron.errors import UsageError

_DOCUMENT = 3000
_BATCH = 350


def make_text(path: Path, megabytes: int) -> list[str]:
    """Write about so many megabytes of JSON lines and return the documents of one round."""
    whole = "\n".join(demo_documents())
    documents = [whole[i : i + _DOCUMENT] for i in range(0, len(whole), _DOCUMENT)]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents).encode()
    with open(path, "wb") as file:
        for _ in range(max(1, round(megabytes * 1e6 / len(lines)))):
            file.write(lines)
    return documents


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure_alone(tokenizer: Tokenizer, documents: Sequence[str], parse: bool, seconds: float) -> float:
    """Return the MB/s of the tokenizer over texts in memory, with or without parsing their JSON lines first."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in documents]
    sizes = [len(text.encode()) for text in documents]
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for at in range(0, len(documents), _BATCH):
            texts = documents[at : at + _BATCH]
            if parse:
                texts = [json.loads(line)["text"] for line in lines[at : at + _BATCH]]
            tokenizer.tokenize_batch(texts)
            done += sum(sizes[at : at + _BATCH])
            if time.perf_counter() - started > seconds:
                break
    return done / 1e6 / (time.perf_counter() - started)


def measure_run(source: Path, given: argparse.Namespace, workers: int, partitions: int = 1) -> tuple[float, float]:
    """Return (MB/s, CPU seconds) of a whole preprocessing run."""
    settings = tokenizer_settings(given) | {"vocab_size": given.vocab_size}
    prefix = source.with_name(f"w{workers}p{partitions}")
    options = PreprocessOptions(
        [source], prefix, append_eod=True, workers=workers, partitions=partitions, log_interval=0, **settings
    )
    before = cpu_seconds()
    report = preprocess(options)
    for path in source.parent.glob(f"{prefix.name}_*"):
        path.unlink()
    return report.num_bytes / 1e6 / report.seconds, cpu_seconds() - before


class MemoryWatch(threading.Thread):
    """Samples the resident memory of this process and its children, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float]] = []
        self._stopped = threading.Event()
        self._begun = time.monotonic()

    def run(self) -> None:
        """Sample until stopped."""
        while not self._stopped.wait(0.1):
            self.samples.append((time.monotonic() - self._begun, _family_memory()))

    def finish(self) -> tuple[float, float]:
        """Return the highest samples of the second fifth and of the last fifth of the time."""
        self._stopped.set()
        self.join()
        end = self.samples[-1][0]
        early = [size for at, size in self.samples if 0.2 * end <= at < 0.4 * end]
        late = [size for at, size in self.samples if at >= 0.8 * end]
        return max(early, default=0.0), max(late, default=0.0)


def _family_memory() -> float:
    """Return the resident memory, without shared pages counted twice, of this process and its children, in MB."""
    pids = [os.getpid()]
    for task in Path("/proc/self/task").iterdir():
        pids += [int(pid) for pid in (task / "children").read_text().split()]
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements and return the exit status."""
    parser = argparse.ArgumentParser(description="Measure preprocessing.", allow_abbrev=False)
    parser.add_argument("--megabytes", type=int, default=200, help="text to preprocess (default: 200)")
    parser.add_argument("--workers", type=int, default=2, help="workers to compare with one (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, the fastest counts (default: 3)")
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder); in memory: /dev/shm")
    parser.add_argument("--only", choices=("speed", "memory"), help="one half of the measurements")
    add_tokenizer_arguments(parser)
    given = parser.parse_args(arguments)
    try:
        tokenizer = build_tokenizer(**tokenizer_settings(given), vocab_size=given.vocab_size)
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            source = Path(folder) / "text.jsonl"
            documents = make_text(source, given.megabytes)
            for line in _report(source, documents, tokenizer, given):
                print(line, flush=True)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _report(source: Path, documents: list[str], tokenizer: Tokenizer, given: argparse.Namespace) -> Any:
    """Yield the lines of the report."""
    load, cores = os.getloadavg()[0], os.cpu_count()
    yield f"{given.tokenizer_type}, {source.stat().st_size / 1e6:.0f} MB, {cores} cores, load {load:.1f} before the run"
    if given.only != "memory":
        yield from _speed(source, documents, tokenizer, given)
    if given.only != "speed":
        watch = MemoryWatch()
        watch.start()
        speed, _ = measure_run(source, given, given.workers)
        early, late = watch.finish()
        yield f"memory, {given.workers} workers       {early:6.0f} MB early, {late:6.0f} MB late, at {speed:.0f} MB/s"


def _speed(source: Path, documents: list[str], tokenizer: Tokenizer, given: argparse.Namespace) -> Any:
    """Yield the lines about speed; the runs take turns, so that a busy spell hits all of them."""
    alone = [0.0, 0.0]
    one = many = (0.0, 1e9)
    for _ in range(given.repeats):
        alone = [
            max(old, measure_alone(tokenizer, documents, parse, 2.0))
            for old, parse in zip(alone, (False, True), strict=True)
        ]
        new = measure_run(source, given, 1), measure_run(source, given, given.workers)
        one, many = ((max(old[0], run[0]), min(old[1], run[1])) for old, run in zip((one, many), new, strict=True))
    yield f"tokenizer alone         {alone[0]:8.1f} MB/s"
    yield f"JSON and tokenizer      {alone[1]:8.1f} MB/s"
    for name, (speed, cpu) in (("1 worker", one), (f"{given.workers} workers", many)):
        yield f"{name:<23} {speed:8.1f} MB/s  {cpu:6.2f} CPU s"
    faster, work = many[0] / one[0], many[1] / one[1]
    yield f"{given.workers} workers : 1 worker    {faster:8.2f} x"
    yield f"  by CPU time           {given.workers / work:8.2f} x   (what {given.workers} free cores would give)"
    yield f"{given.workers} workers : tokenizer   {many[0] / alone[0]:8.2f} x"
    yield f"{given.workers} workers : JSON + tok. {many[0] / alone[1]:8.2f} x"


if __name__ == "__main__":
    sys.exit(main())
