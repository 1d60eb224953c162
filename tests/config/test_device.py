"""The number type that `dtype: auto` stands for."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.paths import ROOT
from tests.runs import small_config
from tramontane import InputError
from tramontane.asking.model import check_model
from tramontane.config import GeneratorConfig, TrainerConfig, device
from tramontane.config.asking import ModelConfig
from tramontane.config.device import dtype_warnings, number_types
from tramontane.config.sft import SFTConfig
from tramontane.doctor import doctor
from tramontane.evaluation.settings import settings_for
from tramontane.run.prepare import prepare, resolved
from tramontane.sft.sft import sft

AVX2 = "fpu sse4_2 avx f16c fma avx2"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Make the processor one with the given instructions, as Linux lists them."""

    def set_flags(flags: str, **environment: str) -> None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        device._cpu_number_type.cache_clear()

    monkeypatch.delenv(device.CPU_DTYPE)
    for name in device._ISA_LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(device.platform, "machine", lambda: "x86_64")
    yield set_flags
    device._cpu_number_type.cache_clear()


@pytest.mark.parametrize(
    ("flags", "expected", "reason"),
    [
        (f"{AVX2} avx512f avx512_bf16 amx_bf16", "bfloat16", "amx_bf16 and avx512_bf16"),
        (f"{AVX2} avx512f avx512_bf16", "bfloat16", "avx512_bf16"),
        ("fp asimd bf16 sve", "bfloat16", "bf16"),
        (AVX2, "float32", "emulated"),
    ],
)
def test_auto_follows_the_instructions_of_the_processor(processor, flags, expected, reason):
    processor(flags)
    assert device.number_type("cpu").dtype == expected
    assert reason in device.number_type("cpu").reason
    sft = SFTConfig(output="x", model="tiny")
    assert {sft.dtype, sft.trainer.dtype} == {expected}
    assert {TrainerConfig().dtype, GeneratorConfig().dtype} == {expected}


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        (f"{AVX2} avx512f", {}),
        ("", {}),
        (f"{AVX2} amx_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    ],
)
def test_a_doubtful_processor_is_measured(processor, monkeypatch, flags, environment):
    """Whichever product is faster decides."""
    monkeypatch.setattr(
        device.platform, "machine", lambda: "riscv64" if not environment else "x86_64"
    )
    processor(flags, **environment)
    rates = device.matrix_rates()
    found = device.number_type("cpu")
    if "oneDNN has no" in found.reason:
        assert found.dtype == "float32"
    else:
        assert (found.dtype == "bfloat16") == (rates["bfloat16"] > 1.2 * rates["float32"])
        assert f"{rates['bfloat16'] / rates['float32']:.1f} times" in found.reason


def test_a_slow_choice_is_warned_of_with_the_factor(processor, tmp_path):
    processor(AVX2)
    config = small_config(tmp_path, trainer={"dtype": "bfloat16"})
    (warning,) = dtype_warnings(config)
    rates = device.matrix_rates()
    assert f"{rates['float32'] / rates['bfloat16']:.1f} times as slow" in warning
    assert warning.startswith("trainer.dtype: bfloat16 is slow here")
    assert not dtype_warnings(small_config(tmp_path, trainer={"dtype": "auto"}))


def test_every_worker_of_a_run_is_warned_of_and_recorded(processor, tmp_path):
    processor(AVX2)
    slow = {"dtype": "bfloat16"}
    config = small_config(
        tmp_path,
        generator=slow,
        trainer=slow | {"objective": {"name": "distill"}},
        pipeline={"diversity": "none"},
        cold_start=slow,
        teacher=slow | {"model": "tiny"},
        verifier={
            "judge": {"checkpoint": slow | {"path": "tiny"}, "rubric": ["It is short."]},
            "domains": {"open": {"verifier": "judge"}},
        },
    )
    sections = {"generator", "trainer", "cold_start", "teacher", "verifier.judge.checkpoint"}
    assert {w.partition(".dtype: bfloat16 is")[0] for w in dtype_warnings(config)} == sections
    reason = device.number_type("cpu").reason
    assert number_types(config) == dict.fromkeys(sections, f"bfloat16 (auto: float32, {reason})")


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (lambda: settings_for("tiny", None, None, [], {"dtype": "bfloat16"}), "generator.dtype"),
        (lambda: sft(SFTConfig(output="new", dtype="bfloat16")), "dtype"),
        (
            lambda: check_model(
                ModelConfig(checkpoint={"path": "tiny", "dtype": "bfloat16"}, max_tokens=9)
            ),
            "checkpoint.dtype",
        ),
    ],
    ids=["eval, compare, generate, serve", "sft", "curate"],
)
def test_other_commands_warn_of_a_slow_choice_too(processor, monkeypatch, tmp_path, command, key):
    processor(AVX2)
    monkeypatch.chdir(tmp_path)
    with (
        pytest.warns(UserWarning, match=f"^{key}: bfloat16 is slow here"),
        suppress(InputError),  # of sft, which is given no model, after the warning
    ):
        command()


def test_first_lines_and_doctor_say_the_type_and_why(processor, tmp_path):
    processor(AVX2)
    lines = resolved(prepare(small_config(tmp_path, generator={"dtype": "float32"})))
    assert lines["number type"].startswith("float32 (auto: float32, this processor has no bfloat16")
    (found,) = [f for f in doctor() if f.name == "dtype: auto"]
    assert found.found.startswith("float32 on the CPU: this processor has no bfloat16")


def test_the_environment_decides_for_all_workers(processor, monkeypatch):
    processor(AVX2)
    monkeypatch.setenv(device.CPU_DTYPE, "bfloat16")
    assert TrainerConfig().dtype == "bfloat16"
    monkeypatch.setenv(device.CPU_DTYPE, "float16")
    with pytest.raises(ValueError, match="TRAMONTANE_CPU_DTYPE='float16' in the environment"):
        TrainerConfig()


def test_no_shipped_config_of_a_run_names_a_number_type():
    """One that is right on one machine is ten times slow on another."""
    for path in (ROOT / "configs").glob("*.yaml"):
        assert '"dtype"' not in json.dumps(yaml.safe_load(path.read_text())), path
