"""How a process finds its job: its options, or the variables of a launcher. No communication on a mesh axis.

Of launchers JAX knows SLURM, Open MPI, Kubernetes and a few more (jax.distributed); what it finds there is taken. A
single process is what nothing else says otherwise. Megatron-LM training/initialize.py reads torchrun's variables.
"""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from jmegatron.config import Config, HardwareConfig
from jmegatron.errors import UsageError
from jmegatron.training import startup
from jmegatron.training.agreement import agree, startup_facts
from jmegatron.training.job import Job

HEARTBEAT_SECONDS = 40
"""A process that has not been heard of for so long is dead, and JAX's client ends all others."""
_ABORT_MARGIN_SECONDS = 60
"""JAX aborts the process where others do not come; our own message is to come first."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a job as one of them sees them."""

    count: int = 1
    index: int = 0
    coordinator: str | None = None
    """host:port of process 0; None in a job of one."""
    local_device_ids: tuple[int, ...] | None = None
    """Accelerators of this process among those that it sees; None: all of them."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Option name -> where its value comes from."""


# ---- resolving ----------------------------------------------------------------------------------------------------
def resolve_processes(hardware: HardwareConfig) -> Processes:
    """Returns the job that the options or the environment name; touches no device.

    Raises:
      UsageError: they name a part of it only, or contradict themselves.
    """
    coordinator = hardware.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    given: dict[str, Any] = {
        "coordinator_address": coordinator,
        "num_processes": hardware.num_processes,
        "process_id": hardware.process_id,
    }
    sources = {name: f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None}
    if coordinator and not hardware.coordinator_address:
        sources["coordinator_address"] = "JAX_COORDINATOR_ADDRESS"
    ids: Any = None
    launcher = "default"
    if hardware.num_processes != 1 and None in given.values():
        launcher, found, ids = _detect(given)
        sources |= {name: launcher for name, value in found.items() if value is not None and given[name] is None}
        given = found
    count = given["num_processes"]
    if count == 1 or all(value is None for value in given.values()):
        return Processes(sources={"num_processes": sources.get("num_processes", launcher)})
    _check(given, sources)
    ids = _usable_ids(ids, count)
    return Processes(count, given["process_id"], given["coordinator_address"], ids, sources)


def _detect(given: Mapping[str, Any]) -> tuple[str, dict[str, Any], Any]:
    """Returns (name of the launcher, the options completed by what its variables say, local device ids)."""
    from jax._src.clusters import ClusterEnv  # jax.distributed.initialize alone offers it, and connects at once

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            present = [env for env in ClusterEnv._cluster_types if not env.opt_in_only_method and env.is_env_present()]
            name = present[0].name or present[0].__name__.removesuffix("Cluster").lower() if present else "default"
            values = ClusterEnv.auto_detect_unset_distributed_params(
                given["coordinator_address"], given["num_processes"], given["process_id"], None, None, 60
            )
        except Exception as error:
            raise UsageError(
                f"the variables of the launcher do not say what processes there are: {error}; fix: give"
                " --coordinator-address HOST:PORT, --num-processes and --process-id, or --num-processes 1 to train"
                " with this process alone"
            ) from error
    if caught and not present:
        name = f"default; {' '.join(str(caught[0].message).split())}"
    return name, dict(zip(given, values[:3], strict=True)), values[3]


def _check(given: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    known = ", ".join(f"{name} {given[name]} ({source})" for name, source in sources.items())
    if missing:
        raise UsageError(
            f"{', '.join(missing)}: not given, and no launcher's variables say it; got {known}; expected all of"
            " --coordinator-address, --num-processes and --process-id for a job of several processes; fix: add what is"
            " missing, or start with scripts/launch_local.py or srun"
        )
    count, index, coordinator = given["num_processes"], given["process_id"], given["coordinator_address"]
    if not 0 <= index < count:
        raise UsageError(
            f"--process-id {index}: got {known}; expected a number from 0 to {count - 1} (--num-processes {count});"
            " fix: number the processes from 0"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--coordinator-address {coordinator}: expected HOST:PORT with a port from 1 to 65535; fix: give the"
            " address of process 0's machine and a port that is free there"
        )


def _usable_ids(ids: Any, count: int) -> tuple[int, ...] | None:
    """Returns the accelerators that JAX gives a process of a launcher, unless the launcher has seen to that itself.

    JAX takes one, the process's number on its machine: wrong where the launcher shows each process its own alone
    (srun --gpus-per-task), and where it starts one process a machine.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    bound = visible is not None and ids is not None and max(ids) >= len(visible.split(","))
    alone_on_its_node = os.environ.get("SLURM_STEP_NUM_NODES") == str(count)
    return None if ids is None or bound or alone_on_its_node else tuple(ids)


def describe_processes(config: Config) -> str:
    """Returns what `--print-distributed` prints.

    Raises:
      UsageError: as `resolve_processes`.
    """
    processes = resolve_processes(config.hardware)
    if processes.count == 1:
        lines = [f"num_processes: 1 ({processes.sources['num_processes']})"]
    else:
        values = {
            "coordinator_address": processes.coordinator,
            "num_processes": processes.count,
            "process_id": processes.index,
        }
        lines = [f"{name}: {value} ({processes.sources[name]})" for name, value in values.items()]
    return "\n".join([*lines, f"local devices: {_expected_devices(config.hardware, processes)}", ""])


def _expected_devices(hardware: HardwareConfig, processes: Processes) -> str:
    if hardware.num_cpu_devices is not None:
        return f"{hardware.num_cpu_devices} virtual CPU devices (--num-cpu-devices, in each process)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "all that JAX finds" if visible is None else f"CUDA_VISIBLE_DEVICES {visible}"
    forced = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if processes.count > 1 and forced:
        return f"numbers {forced} (JAX_LOCAL_DEVICE_IDS) of {seen}"
    if processes.local_device_ids is None:
        return seen
    numbers = ", ".join(map(str, processes.local_device_ids))
    return f"number {numbers} of {seen} (one process a device, by {processes.sources['process_id']})"


# ---- connecting ---------------------------------------------------------------------------------------------------
class CoordinationStore:
    """The key-value store of JAX's coordination service, which lives in process 0."""

    def __init__(self, client: Any):
        self._client = client

    def set(self, key: str, value: str) -> None:
        """Writes a value; a later one replaces it."""
        self._client.key_value_set(f"jmegatron/{key}", value, allow_overwrite=True)

    def get(self, key: str, seconds: float) -> str:
        """Returns a value, waiting for it.

        Raises:
          TimeoutError: it has not been written within `seconds`.
        """
        try:
            return str(self._client.blocking_key_value_get(f"jmegatron/{key}", int(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise _as_timeout(error) from error

    def list(self, prefix: str) -> dict[str, str]:
        """Returns all values whose keys begin with `prefix`/, by the rest of their keys."""
        start = f"jmegatron/{prefix}/"
        return {key.removeprefix(start): value for key, value in self._client.key_value_dir_get(start)}

    def barrier(self, name: str, seconds: float) -> None:
        """Waits until every process is here.

        Raises:
          TimeoutError: one has not come within `seconds`.
        """
        try:
            self._client.wait_at_barrier(f"jmegatron/{name}", int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise _as_timeout(error) from error

    def delete(self, prefix: str) -> None:
        """Removes all values whose keys begin with `prefix`/."""
        self._client.key_value_delete(f"jmegatron/{prefix}/")


def _as_timeout(error: Exception) -> Exception:
    return TimeoutError(str(error)) if "DEADLINE_EXCEEDED" in str(error) else error


def join(job: Job, config: Config) -> None:
    """Connects this process with the others of its job and compares what all must have alike; touches no device.

    Raises:
      UsageError: the job is not described, its processes differ, or process 0 cannot open its port.
    """
    processes = resolve_processes(config.hardware)
    if processes.count == 1:
        return
    minutes = config.hardware.distributed_timeout_minutes
    job.enter(processes.index, processes.count, minutes)
    assert processes.coordinator is not None
    host, _, port = processes.coordinator.rpartition(":")
    job.watch(f"waiting for {processes.count} processes to meet at {processes.coordinator}")
    # JAX would take SIGTERM for itself and keep it until each step asks.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.count,
            processes.index,
            processes.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=minutes * 60 + _ABORT_MARGIN_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=minutes * 60,
            coordinator_bind_address=processes.coordinator if host in ("127.0.0.1", "localhost") else None,
        )
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(
            f"--coordinator-address {processes.coordinator}: process {processes.index} cannot open or reach it"
            f" ({str(error).splitlines()[0]}); fix: a port that is free on process 0's machine ({port} may be taken),"
            " the same address for every process"
        ) from error
    job.store = CoordinationStore(_client())
    job.watch("comparing options and versions")
    job.hosts = agree(job, "options", startup_facts(config, startup.versions()))


def _client() -> Any:
    from jax._src import distributed  # there is no public name for the client

    return distributed.global_state.client
