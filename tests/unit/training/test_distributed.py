"""How a process finds its job: options, SLURM, Open MPI, Kubernetes; pretended environments, no job."""

import os
import subprocess
import sys
from typing import Any

import pytest
from training_runs import OPTIONS, quick_environment

from jmegatron.config import HardwareConfig, load_config, parse_or_exit
from jmegatron.errors import UsageError
from jmegatron.training.distributed import Processes, describe_processes, resolve_processes

LAUNCHER_VARIABLES = (
    "SLURM_",
    "OMPI_",
    "KUBERNETES_",
    "JAX_COORDINATOR",
    "JAX_LOCAL",
    "CUDA_VISIBLE",
    "JOB_COMPLETION",
)
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
"""The second task on the second of two nodes with four tasks each."""
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.96.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_VERSION": "4.1.5",
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_all(variables: dict[str, str], **more: str) -> None:
        for name, value in {**variables, **more}.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_one_process_is_what_nothing_says_otherwise() -> None:
    assert resolve_processes(HardwareConfig()) == Processes(sources={"num_processes": "default"})


def test_slurm_gives_the_first_node_a_port_of_the_job_and_each_task_its_device(pretend: Any) -> None:
    pretend(SLURM)
    found = resolve_processes(HardwareConfig())
    # JAX takes the last 4096 ports by the job's number: 61440 + 4097 % 4096.
    assert (found.coordinator, found.count, found.index, found.local_device_ids) == ("gpu07:61441", 8, 5, (1,))
    assert set(found.sources.values()) == {"slurm"}


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),  # srun --gpus-per-task=1: there is no second device
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, None),  # one task a node: all of its devices
    ],
)
def test_a_task_of_slurm_takes_its_own_device_and_all_where_it_was_given_its_own(
    more: dict[str, str], ids: Any, pretend: Any
) -> None:
    pretend(SLURM, **more)
    assert resolve_processes(HardwareConfig()).local_device_ids == ids


def test_open_mpi_is_known(pretend: Any) -> None:
    pretend(OPEN_MPI)
    found = resolve_processes(HardwareConfig())
    assert (found.coordinator, found.count, found.index, found.local_device_ids) == ("10.96.0.1:61442", 2, 1, (1,))
    assert set(found.sources.values()) == {"ompi"}


def test_kubernetes_without_its_package_trains_alone_and_says_why(pretend: Any) -> None:
    pretend({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    source = resolve_processes(HardwareConfig()).sources["num_processes"]
    assert source.startswith("default; Kubernetes environment detected")
    assert "pip install jax[k8s]" in source


def test_options_win_over_the_launcher_and_may_complete_it(pretend: Any) -> None:
    pretend(SLURM)
    found = resolve_processes(HardwareConfig(coordinator_address="other:1234"))
    assert (found.coordinator, found.count, found.index) == ("other:1234", 8, 5)
    assert found.sources["coordinator_address"] == "--coordinator-address"
    assert resolve_processes(HardwareConfig(num_processes=1)).count == 1
    full = HardwareConfig(coordinator_address="other:1234", num_processes=2, process_id=1)
    assert resolve_processes(full).local_device_ids is None


def test_jax_s_own_variable_names_the_coordinator(pretend: Any) -> None:
    pretend({"JAX_COORDINATOR_ADDRESS": "first:99"})
    found = resolve_processes(HardwareConfig(num_processes=2, process_id=0))
    assert found.coordinator == "first:99"
    assert found.sources["coordinator_address"] == "JAX_COORDINATOR_ADDRESS"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_processes": 2}, ["--coordinator-address, --process-id: not given", "num_processes 2 (--num-processes)"]),
        ({"coordinator_address": "a:1", "num_processes": 2, "process_id": 2}, ["--process-id 2", "0 to 1"]),
        ({"coordinator_address": "a", "num_processes": 2, "process_id": 0}, ["--coordinator-address a", "HOST:PORT"]),
        ({"coordinator_address": "a:70000", "num_processes": 2, "process_id": 0}, ["a:70000", "1 to 65535"]),
    ],
)
def test_half_a_job_is_refused_with_the_options_named(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        resolve_processes(HardwareConfig(**options))
    assert all(word in str(raised.value) for word in [*words, "fix:"])


def test_a_launcher_that_cannot_be_read_is_no_traceback(pretend: Any) -> None:
    pretend(SLURM, SLURM_NTASKS="many")
    with pytest.raises(UsageError, match=r"'many'.*--num-processes 1 to train with this process alone"):
        resolve_processes(HardwareConfig())


def test_print_distributed_shows_the_job_with_its_sources(pretend: Any, capsys: Any) -> None:
    pretend(SLURM, CUDA_VISIBLE_DEVICES="0,1,2,3")
    with pytest.raises(SystemExit) as left:
        parse_or_exit([*OPTIONS, "--print-distributed"], describe_processes)
    assert left.value.code == 0
    assert capsys.readouterr().out == (
        "coordinator_address: gpu07:61441 (slurm)\nnum_processes: 8 (slurm)\nprocess_id: 5 (slurm)\n"
        "local devices: number 1 of CUDA_VISIBLE_DEVICES 0,1,2,3 (one process a device, by slurm)\n"
    )


def test_virtual_devices_are_counted_in_each_process() -> None:
    alone = load_config([*OPTIONS, "--num-cpu-devices", "4"])
    assert "local devices: 4 virtual CPU devices (--num-cpu-devices, in each process)" in describe_processes(alone)
    # Two processes of three devices are six: a batch of eight cannot be divided by six.
    with pytest.raises(UsageError, match="data-parallel size 6"):
        load_config([*OPTIONS, "--num-cpu-devices", "3", "--num-processes", "2"])


def test_print_distributed_touches_no_device() -> None:
    code = (
        "import sys, train\n"
        "try: train.main(sys.argv[1:])\n"
        "except SystemExit as left: assert left.code == 0\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *OPTIONS, "--print-distributed"],
        env=quick_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "num_processes: 1 (default)\nlocal devices: all that JAX finds\n"
