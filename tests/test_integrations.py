"""The action, the workflows and the hooks: valid by their schemas, and run as their hosts run them."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import PROJECT, UNUSED

SCHEMAS = {
    "action.yml": "vendor.github-actions",
    ".github/workflows/audit.yml": "vendor.github-workflows",
    ".github/workflows/leak-tests-gpu.yml": "vendor.github-workflows",
}
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
ACTION = yaml.safe_load((PROJECT / "action.yml").read_text())
HOOKS = yaml.safe_load((PROJECT / ".pre-commit-hooks.yaml").read_text())


@dataclass(frozen=True)
class Job:
    status: int
    out: str
    summary: str
    output: str


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    (root / "old.py").write_text(UNUSED)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*GIT, *command], cwd=root, check=True)
    return root


def _environment(folder: Path, **more: str) -> dict[str, str]:
    """`poolaudit` on the path, as the host would have installed it."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    command = programs / "poolaudit"
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{PROJECT}" exec "{sys.executable}" -m auditor.cli "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **more}


def _action(repository: Path, **inputs: str) -> Job:
    """The action's last step, its inputs filled in from their defaults."""
    folder = repository.parent
    step = ACTION["runs"]["steps"][-1]
    wanted = {name: spec["default"] for name, spec in ACTION["inputs"].items()} | inputs
    values = {key: wanted[value.split("inputs.")[1].split(" ")[0]] for key, value in step["env"].items()}
    summary, output = folder / "summary", folder / "output"
    for file in (summary, output):
        file.write_text("")
    environment = _environment(
        folder, **values, RUNNER_TEMP=str(folder), GITHUB_STEP_SUMMARY=str(summary), GITHUB_OUTPUT=str(output)
    )
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(shell, cwd=repository, env=environment, capture_output=True, text=True)
    return Job(done.returncode, done.stdout, summary.read_text(), output.read_text())


@pytest.mark.parametrize("file", SCHEMAS)
def test_valid_by_its_schema(file: str) -> None:
    if not shutil.which("check-jsonschema", path=str(Path(sys.executable).parent)):
        pytest.skip("check-jsonschema comes with `make test`")
    command = [str(Path(sys.executable).parent / "check-jsonschema"), "--builtin-schema", SCHEMAS[file], file]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_action_reports_everywhere_and_fails(repository: Path) -> None:
    job = _action(repository)
    assert job.status == 1
    assert job.out.startswith("::warning file=old.py,line=1,")
    assert job.summary.startswith("## poolaudit: 1 warning\n")
    assert job.output == "status=1\n"
    assert (
        json.loads((repository / "poolaudit.sarif").read_text())["runs"][0]["results"][0]["ruleId"] == "PA002"
    )


def test_the_action_may_only_tell(repository: Path) -> None:
    job = _action(repository, fail="false")
    assert (job.status, job.output) == (0, "status=1\n")
    (repository / "broken.py").write_text("pool.acquire(\n")
    assert _action(repository, fail="false").status == 2


def test_the_action_looks_at_changed_lines(repository: Path) -> None:
    assert _action(repository, **{"diff-base": "HEAD"}).status == 0
    (repository / "new.py").write_text(UNUSED)
    job = _action(repository, **{"diff-base": "HEAD"})
    assert (job.status, job.out.count("::warning"), "new.py" in job.out) == (1, 1, True)


def test_inputs_are_never_run(repository: Path) -> None:
    evil = '$(touch pwned); `touch pwned` "; touch pwned #'
    for name in ("paths", "arguments", "baseline", "diff-base"):
        assert _action(repository, **{name: evil}).status == 2
    assert not (repository / "pwned").exists()
    for file in SCHEMAS:
        for script in _scripts(yaml.safe_load((PROJECT / file).read_text())):
            assert "${{" not in script


def _scripts(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["run"]] if isinstance(node.get("run"), str) else []
        return own + [script for value in node.values() for script in _scripts(value)]
    return [script for item in node for script in _scripts(item)] if isinstance(node, list) else []


@pytest.mark.parametrize(("number", "before", "after"), [(0, 1, 1), (1, 0, 1)], ids=["all", "changed"])
def test_hooks(repository: Path, number: int, before: int, after: int) -> None:
    hook = HOOKS[number]
    environment = _environment(repository.parent)
    run = [*hook["entry"].split(), "--no-cache"]
    assert subprocess.run(run, cwd=repository, env=environment, capture_output=True).returncode == before
    (repository / "new.py").write_text(UNUSED)
    done = subprocess.run(run, cwd=repository, env=environment, capture_output=True, text=True)
    assert (done.returncode, "new.py" in done.stdout, done.stderr) == (after, True, "")


def test_self_hosted_runners_get_nothing_from_forks() -> None:
    workflow = yaml.safe_load((PROJECT / ".github/workflows/leak-tests-gpu.yml").read_text())
    assert set(workflow[True]) == {"workflow_dispatch", "push"}  # YAML reads `on` as true
