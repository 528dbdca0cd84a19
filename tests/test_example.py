"""The example repository holds honest mistakes among correct code; the audit finds exactly those."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def _expected() -> list[dict[str, object]]:
    return tomllib.loads((EXAMPLES / "EXPECTED.toml").read_text(encoding="utf-8"))["finding"]


def test_the_audit_finds_exactly_the_expected_mistakes() -> None:
    command = [
        sys.executable,
        "-m",
        "auditor.cli",
        "audit",
        "--isolated",
        "--no-cache",
        "--format",
        "json",
        "longdoc",
    ]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    run = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    found = [(f["path"], f["line"], f["code"]) for f in json.loads(run.stdout)["findings"]]
    assert found == [(entry["path"], entry["line"], entry["code"]) for entry in _expected()]


def test_the_expected_mistakes_name_real_lines_and_say_why() -> None:
    for entry in _expected():
        lines = (EXAMPLES / str(entry["path"])).read_text(encoding="utf-8").splitlines()
        assert lines[int(str(entry["line"])) - 1].strip(), entry
        assert entry["why"], entry


def test_the_example_runs() -> None:
    pytest.importorskip("torch")
    run = subprocess.run([sys.executable, "-m", "longdoc"], cwd=EXAMPLES, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "outstanding: 3" in run.stdout  # the rotary table, and one tensor that each of two layers has lost
