"""Completion as the three shells ask for it, and once through each of them."""

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


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_a_real_fish_completes_after_a_comma(tmp_path: Path) -> None:
    program(tmp_path)
    script = """
        _POOLAUDIT_COMPLETE=fish_source poolaudit | source
        complete -C "poolaudit fix --ignore PA1,PA00"
        complete -C "poolaudit audit --exceptions c"
    """
    done = in_shell("fish", script, tmp_path)
    assert done.stdout.splitlines() == ["PA1,PA001\tbare-ignore", "PA1,PA002\tunused-ignore", "calls"], (
        done.stderr
    )


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_a_real_zsh_completes_after_a_comma(tmp_path: Path) -> None:
    """Typed into a terminal of its own: zsh completes nowhere else."""
    program(tmp_path)
    script = """
        zmodload zsh/zpty
        zpty typed zsh -f -i
        line() { zpty -w typed "$1" }
        line 'autoload -U compinit; compinit -u -D; PROMPT=; unsetopt zle_bracketed_paste 2>/dev/null'
        line 'eval "$(_POOLAUDIT_COMPLETE=zsh_source poolaudit)"; echo rea""dy'
        zpty -r typed said '*ready*'
        zpty -w -n typed $'poolaudit audit --exceptions c\t'
        zpty -r typed said '*calls*' && print completed
        zpty -w -n typed $'\x01\x0bpoolaudit fix --ignore PA1,PA00\t\t'
        zpty -r typed said '*PA1,PA002*' && print listed
        zpty -d typed
    """
    done = in_shell("zsh", script, tmp_path)
    assert done.stdout.splitlines() == ["completed", "listed"], done.stderr


def program(folder: Path) -> None:
    """`poolaudit` as a command in a folder."""
    command = folder / "poolaudit"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={PROJECT} exec {sys.executable} -m auditor.cli "$@"\n')
    command.chmod(0o755)


def in_shell(shell: str, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "TERM": "xterm", "LANG": "C.UTF-8"}
    return subprocess.run(
        [shell, "-c", script], env=environment, cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_a_real_bash_completes(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    program(tmp_path)
    script = """
        eval "$(_POOLAUDIT_COMPLETE=bash_source poolaudit)"
        COMP_WORDS=(poolaudit serv) COMP_CWORD=1
        $(complete -p poolaudit | sed 's/.*-F \\([^ ]*\\).*/\\1/') poolaudit
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = in_shell("bash", script, tmp_path)
    assert (done.stdout, done.returncode) == ("server\n", 0), done.stderr
