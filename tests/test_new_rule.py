"""`poolaudit rule --new`: what it writes works in a copy of this checkout, and what it refuses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from auditor.cli.new_rule import CannotScaffold, scaffold
from auditor.rule import all_rules

ROOT = Path(__file__).parent.parent


def _in(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_new_rule_works_and_its_tests_pass(tmp_path: Path) -> None:
    for folder in ("auditor", "rules", "reports", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    made = _in(tmp_path, "auditor.cli", "rule", "--new", "wrong-name")
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[:2] == [
        "wrote rules/wrong_name.py",
        "wrote tests/fixtures/adoption/pa901/cases.py",
    ]
    page = _in(tmp_path, "auditor.cli", "rule", "PA901").stdout
    assert page.startswith("PA901 wrong-name:")
    assert "Off by default" in page
    tests = _in(
        tmp_path, "pytest", "-q", "tests/test_adoption.py", "tests/test_engine.py", "-k", "PA901 or pa901"
    )
    assert tests.returncode == 0, tests.stdout
    assert _in(tmp_path, "auditor.cli", "rule", "--new", "wronger-name", "PA199").returncode == 0
    tests = _in(tmp_path, "pytest", "-q", "tests/test_fixtures.py", "-k", "pa199 or PA199")
    assert tests.returncode == 0, tests.stdout
    (tmp_path / "rules" / "wronger_name.py").unlink()
    broken = (tmp_path / "rules" / "wrong_name.py").read_text().replace('== "wrong"', '== "right"')
    (tmp_path / "rules" / "wrong_name.py").write_text(broken)
    assert _in(tmp_path, "pytest", "-q", "tests/test_adoption.py", "-k", "PA901 or pa901").returncode == 1
    again = _in(tmp_path, "auditor.cli", "rule", "--new", "wrong-name")
    assert again.returncode == 2
    assert "PA901 is called `wrong-name` already" in again.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "rules").mkdir()
    (tmp_path / "tests" / "fixtures" / "adoption").mkdir(parents=True)
    return tmp_path


def test_codes_and_files(checkout: Path) -> None:
    rule, fixture = scaffold(checkout, "lost-in-thought", "PA399", all_rules())
    assert rule == checkout / "rules" / "lost_in_thought.py"
    assert fixture == checkout / "tests" / "fixtures" / "adoption" / "pa399" / "cases.py"
    assert 'META = Meta(code="PA399", name="lost-in-thought"' in rule.read_text()


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("Wrong-Name", None, "`Wrong-Name` is no name for a rule"),
        ("leak", None, "`leak` is no name for a rule"),
        ("../evil-name", None, "`../evil-name` is no name for a rule"),
        ("early-exit-leak", None, "PA102 is called `early-exit-leak` already"),
        ("new-fault", "PA102", "PA102 is taken by `early-exit-leak`"),
        ("new-fault", "X1", "`X1` is no code"),
        ("new-fault", "PA099", "`PA099` is no code"),
    ],
)
def test_what_is_refused(checkout: Path, name: str, code: str | None, message: str) -> None:
    with pytest.raises(CannotScaffold) as refused:
        scaffold(checkout, name, code, all_rules())
    assert message in str(refused.value)
    assert list(checkout.rglob("*.py")) == []


def test_it_writes_over_nothing_and_wants_a_checkout(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (checkout / "rules" / "new_fault.py").write_text("mine")
    with pytest.raises(CannotScaffold, match="exists already"):
        scaffold(checkout, "new-fault", None, all_rules())
    assert (checkout / "rules" / "new_fault.py").read_text() == "mine"
    with pytest.raises(CannotScaffold, match="at the root of a checkout"):
        scaffold(tmp_path_factory.mktemp("elsewhere"), "new-fault", None, all_rules())
