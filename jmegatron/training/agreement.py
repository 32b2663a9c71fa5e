"""What all processes of a job must have alike, compared before they compute together. Talks through the job's store.

Processes that differ compute wrong numbers without an error, or wait for one another for ever: each compiles the
program that its own options say. So options, versions and source are compared before the devices are looked at, data
and checkpoint before the first array, and the training step itself before it runs.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import os
import socket
import subprocess
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jmegatron
from jmegatron.config import SECTIONS, Config
from jmegatron.data.gpt_dataset import SampleSource, Sources
from jmegatron.errors import TrainingError, UsageError
from jmegatron.training.job import Job

MAY_DIFFER = (
    "process_id",
    "coordinator_address",  # they have met
    "data_cache_path",
    "compilation_cache_dir",
    "no_compilation_cache",
    "metrics_file",
    "tensorboard_dir",
    "profile_dir",
    "progress_bar",
)
"""Options that each process may have its own value of: who it is, places on its machine, and what process 0 alone
writes. (Where data and checkpoints lie is not among them: what is found there is compared as well.)"""

Facts = Mapping[str, str]
_SHOWN = 8
"""Differences that a message lists."""


# ---- facts --------------------------------------------------------------------------------------------------------
def startup_facts(config: Config, versions: Mapping[str, str]) -> dict[str, str]:
    """Returns what can be compared before any device is looked at: options, versions, source, XLA's flags."""
    facts = {f"version of {name}": version for name, version in versions.items()}
    facts |= source_facts(Path(jmegatron.__file__).parent)
    facts["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    for section in SECTIONS:
        for name, value in dataclasses.asdict(getattr(config, section)).items():
            if name not in MAY_DIFFER:
                facts[f"--{name.replace('_', '-')}"] = json.dumps(value)
    return facts


@functools.cache
def source_facts(package: Path) -> dict[str, str]:
    """Returns the git revision of the package's checkout, and a digest of its source as it lies there."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    facts = {"digest of the source": digest.hexdigest()[:16]}
    if (package.parent / ".git").exists():
        revision = _git(package.parent, "rev-parse", "HEAD")
        modified = _git(package.parent, "status", "--porcelain", "--untracked-files=no")
        facts["git revision"] = revision + (" (modified)" if modified else "")
    return facts


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def data_facts(devices: Sequence[Any], sources: Sources, checkpoint: str | None) -> dict[str, str]:
    """Returns what can be compared before the first array: devices, data, checkpoint.

    Args:
      devices: of this process.
      sources: the samples that it found.
      checkpoint: what identifies the one that it found, None: none.
    """
    facts = {"number of its devices": f"{len(devices)} x {devices[0].device_kind}"}
    for split, source in zip(("training", "validation", "test"), sources, strict=True):
        facts[f"{split} samples"] = "none" if source is None or not len(source) else _sample_fact(source)
    return {**facts, "checkpoint to go on from": checkpoint or "none"}


def _sample_fact(source: SampleSource) -> str:
    number = len(source)
    checksum = 0
    for sample in (source[0], source[number - 1]):
        for name in sorted(sample):
            checksum = zlib.crc32(np.ascontiguousarray(sample[name]), checksum)
    return f"{number}, first and last with checksum {checksum:08x}"


def program_digest(text: str) -> str:
    """Returns a digest of a lowered program's text, which must hold no locations."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- comparison ---------------------------------------------------------------------------------------------------
def agree(job: Job, stage: str, facts: Facts, error: type[Exception] = UsageError) -> list[str]:
    """Compares the facts of all processes; returns the names of their hosts.

    Every process raises the same error. Communication: one value written and one read by each process, all read by
    process 0.

    Args:
      job: the job.
      stage: name of this comparison; each name serves once.
      facts: what must be the same everywhere.
      error: what to raise where they are not.

    Raises:
      TrainingError: a process has not come within the job's `minutes`.
    """
    host = socket.gethostname()
    if job.store is None:
        return [host]
    store, seconds = job.store, job.minutes * 60.0
    store.set(f"facts/{stage}/{job.index}", json.dumps({"host": host, "facts": dict(facts)}))
    if job.index == 0:
        end = time.monotonic() + seconds
        everyone = [
            json.loads(_wait(job, f"facts/{stage}/{index}", max(end - time.monotonic(), 0.1), f"process {index}"))
            for index in range(job.count)
        ]
        hosts = [entry["host"] for entry in everyone]
        message = difference(hosts, [entry["facts"] for entry in everyone])
        store.set(f"verdict/{stage}", json.dumps([hosts, message]))
    else:
        hosts, message = json.loads(_wait(job, f"verdict/{stage}", seconds + 10, "process 0"))
    if message:
        job.all_know = True
        raise error(message)
    return list(hosts)


def _wait(job: Job, key: str, seconds: float, who: str) -> str:
    assert job.store is not None
    try:
        return job.store.get(key, seconds)
    except TimeoutError:
        raise TrainingError(
            f"{who} has not come to the comparison {key!r} within {seconds:.0f} s; fix: look at its log, or a longer"
            " --distributed-timeout-minutes"
        ) from None


def difference(hosts: Sequence[str], facts: Sequence[Facts]) -> str:
    """Returns a message that names each process, key and value that differ, "" where nothing does.

    What most processes have counts as right, and what process 0 has where there is no majority.
    """
    lines = []
    for key in dict.fromkeys(key for own in facts for key in own):
        values = [own.get(key, "(not there)") for own in facts]
        counts = collections.Counter(values)
        if len(counts) == 1:
            continue
        usual = max(counts, key=lambda value: (counts[value], value == values[0]))
        lines += [
            f"process {index} ({hosts[index]}): {key} is {value}, but {usual} in process {values.index(usual)}"
            f" ({hosts[values.index(usual)]})"
            for index, value in enumerate(values)
            if value != usual
        ]
    if not lines:
        return ""
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return (
        "the processes of this job differ:\n  "
        + "\n  ".join([*lines[:_SHOWN], *more])
        + "\n  fix: start every process with the same options, source and packages, and let all see the same files"
    )
