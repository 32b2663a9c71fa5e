"""Trains a GPT: python train.py --config configs/gpt_tiny.yaml [--any-option value ...].

Exit status: 0 done, also after SIGTERM or SIGINT (the step is finished, and saved where --save says so); 2 an option, a
file or a folder cannot be used, or the processes of the job differ (one message says which); 3 another process of the
job failed, as its own log says, or, of a dry run, the step does not fit its GPUs; 128 + number of the signal: a signal
before the first step, or a second one; 1 anything else.
"""

import logging
import os
import sys

from jmegatron.config import Config, parse_or_exit
from jmegatron.errors import NothingFits, TrainingError, UsageError
from jmegatron.training.job import Job


def main(argv: list[str], job: Job | None = None) -> int:
    """Parses the options, trains, and returns the exit status; `job` looks after signals and other processes."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    job = job or Job()
    config = parse_or_exit(argv, _describe_processes)
    try:
        # After parsing: a wrong option must not wait for jax to load.
        if config.hardware.dry_run:
            # Before jax is imported: its CUDA plugin, which is the compiler, fails its own checks without a GPU.
            os.environ["JAX_PLATFORMS"] = "cpu"
            from jmegatron.training.dry_run import run as dry_run

            return dry_run(config)
        from jmegatron.training.distributed import join
        from jmegatron.training.loop import run

        join(job, config)
        run(config, job=job)
        job.close()
        return 0
    except UsageError as error:
        nothing_fits = config.hardware.dry_run and isinstance(error, NothingFits)
        status, text = 3 if nothing_fits else 2, f"error: {error}"
    except TrainingError as error:
        status, text = 1, f"error: {error}"
    except BrokenPipeError:
        # Whoever read the log has gone (`| head`); at exit Python would try to write the rest once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status, text = 1, "standard output was closed, stopping"
    except Exception as error:
        if job.count == 1:
            raise
        # A collective that fails is most often the consequence of a process that died elsewhere; the stack tells where
        # this one waited for it.
        job.print_error()
        job.await_cause(2.0 if type(error).__name__ == "JaxRuntimeError" else 0.0)
        status, text = 1, f"{type(error).__name__}: {error}{_lost_peer(error)}"
    print(f"train.py: {text}", file=sys.stderr, flush=True)
    if job.count > 1:
        job.fail(status, text)
    return status


def _lost_peer(error: Exception) -> str:
    """Returns what is likely behind an error of the network; whoever was killed could not say why."""
    lost = any(word in str(error) for word in ("closed by peer", "reset by peer", "NCCL"))
    return "; most likely another process was killed or died: see its log, and the system's (memory?)" if lost else ""


def _describe_processes(config: Config) -> str:
    from jmegatron.training.distributed import describe_processes

    return describe_processes(config)


if __name__ == "__main__":
    whole_job = Job()
    whole_job.start()
    sys.exit(main(sys.argv[1:], whole_job))
