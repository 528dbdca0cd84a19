"""Completion as the three shells ask for it, and once through a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import PROJECT, poolaudit

SHELLS = ("bash", "zsh", "fish")


def offered(shell: str, *words: str, cwd: Path) -> list[str]:
    """What a shell is offered for the last of `words`."""
    typed = " ".join(("poolaudit", *words))
    where = words[-1] if shell == "fish" else str(len(words))
    done = poolaudit(cwd=cwd, _POOLAUDIT_COMPLETE=f"{shell}_complete", COMP_WORDS=typed, COMP_CWORD=where)
    assert (done.status, done.err) == (0, "")
    if shell == "zsh":
        return done.out.splitlines()[1::3]
    return [line.partition(",")[2].partition("\t")[0] for line in done.out.splitlines()]


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_options_and_choices(tmp_path: Path, shell: str) -> None:
    assert offered(shell, "con", cwd=tmp_path) == ["config"]
    assert offered(shell, "audit", "--exc", cwd=tmp_path) == ["--exceptions"]
    assert offered(shell, "audit", "--exceptions", "c", cwd=tmp_path) == ["calls"]


@pytest.mark.parametrize("shell", SHELLS)
def test_rule_codes(tmp_path: Path, shell: str) -> None:
    assert offered(shell, "rule", "PA00", cwd=tmp_path) == ["PA001", "PA002"]
    assert offered(shell, "audit", "--select", "pa00", cwd=tmp_path) == ["PA001", "PA002"]
    codes = offered(shell, "fix", "--ignore", "PA1,PA00", cwd=tmp_path)
    assert [code.rpartition(",")[2] for code in codes] == ["PA001", "PA002"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_names_the_program(tmp_path: Path, shell: str) -> None:
    done = poolaudit(cwd=tmp_path, _POOLAUDIT_COMPLETE=f"{shell}_source")
    if done.status and "not supported" in done.err:
        pytest.skip(done.err.strip())
    assert f"_POOLAUDIT_COMPLETE={shell}_complete" in done.out


def test_a_real_bash_completes(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    command = tmp_path / "poolaudit"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={PROJECT} exec {sys.executable} -m auditor.cli "$@"\n')
    command.chmod(0o755)
    script = """
        eval "$(_POOLAUDIT_COMPLETE=bash_source poolaudit)"
        COMP_WORDS=(poolaudit serv) COMP_CWORD=1
        $(complete -p poolaudit | sed 's/.*-F \\([^ ]*\\).*/\\1/') poolaudit
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        [bash, "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("server\n", 0), done.stderr
