"""The examination of a machine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import tramontane
from tramontane.cli import app
from tramontane.doctor import GpuFacts, _attention_error, _examine_gpu, gpu_findings
from tramontane.models.gpu import Build
from tramontane.verifier.code import sandbox


def test_every_part_is_reported():
    names = {finding.name for finding in tramontane.doctor()}
    named = {"torch", "sandbox", *sandbox.RUNGS[:-1], "g++", "ray", "reasoning-gym"}
    assert named | {"pyarrow", "scipy"} <= names
    assert all(finding.remedy for finding in tramontane.doctor() if finding.state != "ok")


def test_without_a_sandbox(monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda: "rlimits")
    monkeypatch.setattr(sandbox, "why_not", lambda rung: "not allowed")
    ran = CliRunner().invoke(app, ["doctor"])
    assert ran.exit_code == 1
    assert "allow_unsandboxed" in ran.output


H100 = GpuFacts("NVIDIA H100 80GB HBM3", (9, 0), 70 << 30, 80 << 30, 0.0031)
BUILD = Build("2.13.0+cu130", "13.0", "580.65.06", ("sm_80", "sm_90"))


def test_each_gpu_is_reported_with_its_driver_memory_and_attention():
    found = {finding.name: finding for finding in gpu_findings(BUILD, [H100, H100])}
    assert {finding.state for finding in found.values()} == {"ok"}
    assert found["driver"].found == "580.65.06"
    assert found["kernels"].found == "sm_80 sm_90"
    assert found["cuda:1"].found == "NVIDIA H100 80GB HBM3, capability 9.0, 70.0 of 80.0 GiB free"
    assert found["cuda:0 attention"].found == "differs from float32 by 3.1e-03"


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"attention": 0.3}, "cuda:0 attention", "another release of torch"),
        ({"attention": float("nan")}, "cuda:0 attention", "another release of torch"),
        ({"attention": "no kernel image is available"}, "cuda:0 attention", "no kernel image"),
        ({"capability": (7, 0)}, "cuda:0", "no kernels for capability 7.0"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_missing_part(changes, name, said):
    findings = gpu_findings(BUILD, [replace(H100, **changes)])
    (missing,) = [finding for finding in findings if finding.state == "missing"]
    assert missing.name == name
    assert said in missing.remedy


def test_without_a_gpu_the_reason_is_said():
    (found,) = gpu_findings(replace(BUILD, driver="550.54"), [])
    assert (found.name, found.state) == ("cuda", "optional")
    assert "needs driver 580" in found.remedy
    older = gpu_findings(replace(BUILD, kernels=("sm_75",)), [replace(H100, capability=(7, 5))])
    assert "without flash attention" in older[-1].found


def test_each_gpu_is_asked_for_one_attention(monkeypatch):
    about = SimpleNamespace(name="H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: about}.get)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {3: (70, 80)}.get)
    monkeypatch.setitem(_examine_gpu.__globals__, "_attention_error", {"cuda:3": 0.25}.get)
    assert _examine_gpu(3) == GpuFacts("H100", (9, 0), 70, 80, 0.25)


def test_attention_is_compared_with_float32():
    assert 0 < _attention_error("cpu") < 0.01


@pytest.mark.gpu
def test_attention_on_a_gpu_is_as_exact():
    assert 0 < _attention_error("cuda:0") < 0.01


def test_a_chat_template_is_examined_instead():
    ran = CliRunner().invoke(app, ["doctor", "--chat", "tiny"])
    assert ran.exit_code == 0
    assert "thoughts, then a message" in ran.output and "appended" in ran.output
    assert "sandbox" not in ran.output and "mistral-common" not in ran.output
