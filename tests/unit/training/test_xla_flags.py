"""XLA options: what is recommended, who has the last word, and that nothing unknown reaches XLA."""

import pytest

from jmegatron.errors import ConfigError
from jmegatron.training import xla_flags
from jmegatron.training.xla_flags import check_environment, parse, recommended, step_options

PIPELINE = {"pp": 2, "dp": 2, "ep": 1, "cp": 1, "tp": 1}
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


def test_every_recommended_option_is_known_to_this_jaxlib():
    for name, value in recommended(PIPELINE, on_gpu=True).items():
        assert xla_flags.why_refused(name, value) is None, name


def test_one_device_and_cpus_get_none():
    assert recommended(dict.fromkeys(PIPELINE, 1), on_gpu=True) == {}
    assert step_options(PIPELINE, on_gpu=False).values == {}


def test_the_command_line_overrides_what_is_recommended_and_the_environment_both(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_experimental_parallel_collective_overlap_limit=2 --other")
    found = step_options(PIPELINE, True, f"--{SCHEDULER}=false xla_gpu_autotune_level=0")
    assert found.values == {
        SCHEDULER: False,
        "xla_disable_hlo_passes": "collective-permute-motion",
        "xla_gpu_autotune_level": 0,
    }
    assert any("overlap_limit: XLA_FLAGS says 2" in line for line in found.lines)
    assert f"{SCHEDULER}=false (--xla-flags)" in found.lines[0]
    assert step_options(PIPELINE, True, None, use_recommended=False).values == {}


def test_a_recommended_option_that_jaxlib_does_not_know_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr(xla_flags, "recommended", lambda *_: {"xla_of_next_year": 1, SCHEDULER: True})
    found = step_options(PIPELINE, True)
    assert found.values == {SCHEDULER: True}
    assert any("xla_of_next_year=1" in line and "No such compile option" in line for line in found.lines)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("xla_of_next_year=1", "No such compile option"),
        (f"{SCHEDULER}=7", "not a valid bool"),
        ("fast=true", "is no option of XLA"),
        (f"{SCHEDULER} {SCHEDULER}=false", "comes twice"),
    ],
)
def test_an_option_that_cannot_be_is_one_message(given, message):
    with pytest.raises(ConfigError, match=f"--xla-flags.*{message}"):
        step_options(PIPELINE, True, given)


def test_words_have_the_types_that_xla_wants():
    assert parse("--xla_a=True xla_b=4 xla_c=0.5 xla_d=x,y xla_e= xla_f", "here") == {
        "xla_a": True,
        "xla_b": 4,
        "xla_c": 0.5,
        "xla_d": "x,y",
        "xla_e": "",
        "xla_f": True,
    }


def test_xla_flags_of_the_environment_are_refused_where_jaxlib_would_abort():
    check_environment({"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"})
    with pytest.raises(ConfigError, match=r"XLA_FLAGS.*Unknown flag.*xla_of_next_year"):
        check_environment({"XLA_FLAGS": "--xla_of_next_year=1"})


@pytest.mark.parametrize("flag", ["--xla_gpu_autotune_level=abc", "--xla_force_host_platform_device_count=abc"])
def test_a_known_option_of_the_environment_with_a_bad_value_is_one_message(flag):
    with pytest.raises(ConfigError, match=r"XLA_FLAGS.*Couldn't interpret value abc") as raised:
        check_environment({"XLA_FLAGS": flag})
    assert "\n" not in str(raised.value)


def test_known_options_with_good_values_start_no_process(monkeypatch):
    monkeypatch.setattr(xla_flags, "_refusal", lambda flags: pytest.fail("asked"))
    check_environment({"XLA_FLAGS": f"--xla_force_host_platform_device_count=8 --{SCHEDULER}=true --{SCHEDULER}"})
