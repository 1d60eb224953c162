"""The examination of a machine."""

from typer.testing import CliRunner

import tramontane
from tramontane.cli import app
from tramontane.verifier.code import sandbox


def test_every_part_is_reported():
    names = {finding.name for finding in tramontane.doctor()}
    assert {"torch", "sandbox", *sandbox.RUNGS[:-1], "g++", "ray", "reasoning-gym"} <= names
    assert all(finding.mend for finding in tramontane.doctor() if finding.state != "ok")


def test_without_a_sandbox(monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda: "rlimits")
    monkeypatch.setattr(sandbox, "why_not", lambda rung: "not allowed")
    ran = CliRunner().invoke(app, ["doctor"])
    assert ran.exit_code == 1
    assert "allow_unsandboxed" in ran.output


def test_a_chat_template_is_examined_instead():
    ran = CliRunner().invoke(app, ["doctor", "--chat", "tiny"])
    assert ran.exit_code == 0
    assert "thoughts, then a message" in ran.output and "appended" in ran.output
    assert "sandbox" not in ran.output
