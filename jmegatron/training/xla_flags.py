"""The XLA options of the training step: which are recommended, which the installed jaxlib knows, who has the last word.

No communication. recommended < `--xla-flags` < the environment's `XLA_FLAGS`. All but the last go to XLA with the step
that is compiled, not through the environment: an option that jaxlib does not know is then an error that can be caught,
where an unknown name in `XLA_FLAGS` aborts the process. Names and spellings move between versions, so each option is
tried on a one-instruction program first.
"""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jmegatron.errors import ConfigError
from jmegatron.mesh import PIPELINE_AXIS, SEQUENCE_AXIS

Value = bool | int | float | str

_PROBE_SECONDS = 60
# In every jaxlib that is supported, with such values: no process has to be started to find that out.
_ALWAYS_KNOWN = re.compile(
    r"--xla_(force_host_platform_device_count|gpu_autotune_level|backend_optimization_level)=\d{1,9}"
    r"|--xla_gpu_enable_latency_hiding_scheduler(=(true|false))?"
)


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """XLA options of a step.

    Attributes:
      values: option -> value, as the compiler takes them.
      lines: what the log says about them.
    """

    values: dict[str, Value]
    lines: tuple[str, ...]


def recommended(mesh_shape: Mapping[str, int], on_gpu: bool) -> dict[str, Value]:
    """Returns the options that a step on the mesh gains from; the same for every card of `planner.cards`.

    - The latency hiding scheduler moves the start of a transfer up and its end down. (Newest jaxlib uses it anyway.)
    - A pipeline's permutes run beside whole loops over layers: collective-permute-motion would move a permute to
      another tick of the loop, and the overlap limit counts the collectives inside the loop that the permute is to
      overlap. In the backward of context parallelism two permutes run beside the same attention kernel.
    """
    if not on_gpu or all(size == 1 for size in mesh_shape.values()):
        return {}
    options: dict[str, Value] = {"xla_gpu_enable_latency_hiding_scheduler": True}
    if mesh_shape[PIPELINE_AXIS] > 1 or mesh_shape[SEQUENCE_AXIS] > 1:
        options["xla_disable_hlo_passes"] = "collective-permute-motion"
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 4
    return options


def step_options(
    mesh_shape: Mapping[str, int], on_gpu: bool, given: str | None = None, use_recommended: bool = True
) -> StepOptions:
    """Returns the options that the step is compiled with, each known to the installed jaxlib.

    Args:
      mesh_shape: size of each mesh axis.
      on_gpu: whether the step is for GPUs.
      given: what `--xla-flags` says.
      use_recommended: whether to take the recommended ones.

    Raises:
      ConfigError: an option of `given` is not known, or its value is none.
    """
    wanted = recommended(mesh_shape, on_gpu) if use_recommended else {}
    own = parse(given or "", "--xla-flags")
    environment = parse(os.environ.get("XLA_FLAGS", ""), "XLA_FLAGS", strict=False)
    lines = []
    values: dict[str, Value] = {}
    for name, value in {**wanted, **own}.items():
        if name in environment:
            lines.append(f"XLA option {name}: XLA_FLAGS says {_text(environment[name])}")
            continue
        reason = why_refused(name, value)
        if reason is None:
            values[name] = value
        elif name in own:
            raise ConfigError(
                f"--xla-flags {name}={_text(value)}: jaxlib {_jaxlib_version()} refuses it ({reason}); expected an"
                " option of the installed version; fix: correct or remove it"
            )
        else:
            lines.append(f"XLA option {name}={_text(value)} is recommended, but left out: {reason}")
    text = " ".join(f"{name}={_text(value)}{' (--xla-flags)' if name in own else ''}" for name, value in values.items())
    return StepOptions(values, (f"XLA options of the step: {text or '(none)'}", *lines))


@functools.lru_cache(maxsize=256)
def why_refused(name: str, value: Value) -> str | None:
    """Returns why the installed jaxlib refuses the option, None where it takes it."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names others alone
        device = jax.local_devices()[0]
    try:
        with jax.default_device(device):
            jax.jit(lambda x: x, compiler_options={name: value}).lower(jnp.int32(0)).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    return None


def parse(text: str, where: str, strict: bool = True) -> dict[str, Value]:
    """Returns option -> value of words such as `xla_a=true` or `--xla_b=4`; a word without value is true.

    Args:
      text: the words.
      where: what to call them in messages.
      strict: whether other words are refused, or passed over.

    Raises:
      ConfigError: a word is none of these, or a name comes twice.
    """
    found: dict[str, Value] = {}
    for word in text.split():
        match = re.fullmatch(r"(?:--)?(xla_[a-z0-9_]+)(?:=(.*))?", word)
        if match is None or (match[1] in found and strict):
            if not strict:
                continue
            problem = "comes twice" if match else "is no option of XLA"
            raise ConfigError(
                f"{where}: {word!r} {problem}; expected words such as xla_gpu_enable_latency_hiding_scheduler=true,"
                " each name once; fix: correct or remove it"
            )
        found[match[1]] = True if match[2] is None else _value(match[2])
    return found


def _value(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _jaxlib_version() -> str:
    return jax.lib.__version__


# ---- the environment ----------------------------------------------------------------------------------------------
def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Checks that jaxlib will take the environment's `XLA_FLAGS`; it would abort the process later.

    Asks a process of its own, unless all are known ones: it takes a second or two. Must run before JAX looks at its
    devices to be of use.

    Raises:
      ConfigError: it will not.
    """
    text = environment.get("XLA_FLAGS", "")
    if all(_ALWAYS_KNOWN.fullmatch(word) for word in text.split()):
        return
    reason = _refusal(text)
    if reason is not None:
        raise ConfigError(
            f"XLA_FLAGS={text!r}: jaxlib {_jaxlib_version()} refuses it ({reason}); expected options of the installed"
            " version, with values they take; fix: correct or remove it, --xla-flags names the option that is wrong"
        )


@functools.lru_cache(maxsize=16)
def _refusal(flags: str) -> str | None:
    command = [sys.executable, "-c", "import jax; jax.devices('cpu')"]
    environment: dict[str, Any] = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None  # nothing learned; jaxlib itself will say
    if done.returncode == 0:
        return None
    match = re.search(r"(Unknown flags? in XLA_FLAGS: .*|Couldn't interpret value .*)", done.stderr)
    last = done.stderr.strip().splitlines()[-1:] or [f"ended with status {done.returncode}"]
    return match[1].strip() if match else last[0][:300]
