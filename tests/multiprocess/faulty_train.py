"""train.py with a fault: python faulty_train.py PROCESS STEP KIND OPTION ...

After that step, that process: raise (an exception), kill (itself, as the system does when memory is short; kill-once:
in this folder), hang (for ever), term (gets a SIGTERM), slow (from then on, 0.2 s of its own a step). other-data: it
finds another corpus than the others. In the save after that step: no-space (its files cannot be written), kill-in-save
(killed when they are written and the checkpoint is not yet whole).
"""

import os
import signal
import sys
import time
from pathlib import Path

print(f"started at {time.time():.2f}", flush=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # noqa: E402
from jmegatron.training.job import Job  # noqa: E402

process, step, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
stops_after = Job.stops_after
if kind == "other-data" and sys.argv[-1] == str(process):  # --process-id is last
    import jmegatron.training.agreement

    jmegatron.training.agreement._sample_fact = lambda source: "40, first and last with checksum 0badf00d"


if kind in ("no-space", "kill-in-save"):
    from jmegatron.checkpoint.writer import CheckpointWriter

    write_own = CheckpointWriter._write_own

    def faulty_write(writer: CheckpointWriter, building: Path, futures: list) -> None:
        if (writer._peers.index, building.name) != (process, f"{step}.tmp"):
            return write_own(writer, building, futures)
        if kind == "no-space":
            raise OSError(28, "No space left on device")
        write_own(writer, building, futures)
        print(f"fault {kind} at {time.time():.2f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    CheckpointWriter._write_own = faulty_write  # type: ignore[method-assign]


def with_fault(job: Job, now: int) -> str | None:
    if kind == "hang":
        job.minutes = 0.1
    if process == job.index and (now == step or (kind == "slow" and now > step)):
        print(f"fault {kind} at {time.time():.2f}", flush=True)
        if kind == "raise":
            raise RuntimeError("the fault of the test")
        if kind == "kill" or (kind == "kill-once" and not os.path.exists("killed")):
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep({"hang": 1e6, "slow": 0.2}.get(kind, 0.0))
    return stops_after(job, now)


Job.stops_after = with_fault  # type: ignore[method-assign]

if __name__ == "__main__":
    whole_job = Job()
    whole_job.start()
    sys.exit(train.main(sys.argv[4:], whole_job))
