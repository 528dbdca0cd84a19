"""The pytest plugin in a pytest of its own: the marker, the fixture, and a Python without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARKED = """
import pytest, torch

KEPT = []

@pytest.mark.no_leaks
def test_clean():
    torch.zeros(3).sum()

@pytest.mark.no_leaks
def test_leaky(tmp_path):
    assert tmp_path.exists()
    KEPT.append(torch.zeros(3))

@pytest.mark.no_leaks(quiet=True)
def test_objects():
    KEPT.append(object())

@pytest.mark.no_leaks
def test_fails_by_itself():
    assert 1 == 2

def test_fixture(leak_ledger):
    assert leak_ledger.check(lambda: torch.zeros(3)).windows == 3
    assert leak_ledger.check_faults(lambda: torch.zeros(3)) == 1
    with pytest.raises(AssertionError, match="12 bytes"), leak_ledger.nothing_stays():
        KEPT.append(torch.zeros(3))

def test_unmarked():
    KEPT.append(torch.zeros(3))
"""
WITHOUT_TORCH = """
import pytest

@pytest.mark.no_leaks
def test_body_runs_once():
    pass

def test_fixture(leak_ledger):
    raise AssertionError("not reached")
"""
NO_TORCH = """
import sys

sys.modules["torch"] = None  # as good as not installed, for import and find_spec
"""


def run_pytest(folder: Path, test: str, **files: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(test)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    plugin = ["-p", "no:poolaudit", "-p", "no:cacheprovider", "-p", "auditor.leaktests.pytest_plugin"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--strict-markers", *plugin, "-c", os.devnull, "test_it.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
def test_marker_and_fixture(tmp_path):
    told = run_pytest(tmp_path, MARKED).stdout
    for passed in ("test_clean", "test_fixture", "test_unmarked"):
        assert f"PASSED test_it.py::{passed}" in told
    assert "FAILED test_it.py::test_leaky - Failed: memory grows by 12 bytes and 1 storage a step" in told
    assert "KEPT.append(torch.zeros(3))" in told
    assert "FAILED test_it.py::test_objects - Failed: Python's heap grows by" in told
    assert "FAILED test_it.py::test_fails_by_itself - assert 1 == 2" in told


def test_without_torch_the_body_runs_once_and_says_so(tmp_path):
    done = run_pytest(tmp_path, WITHOUT_TORCH, conftest=NO_TORCH)
    assert "1 passed, 1 skipped, 1 warning" in done.stdout, done.stdout + done.stderr
    assert "no_leaks not checked: torch is missing" in done.stdout


def test_the_plugin_imports_no_torch():
    code = "import sys, auditor.leaktests.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
