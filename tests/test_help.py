"""Every command's help is a page: what, examples, files, exit statuses, 80 columns."""

from pathlib import Path

import pytest

from auditor.cli import COMMANDS, TASKS
from tests.command_line import poolaudit


def page(*command: str, cwd: Path) -> str:
    done = poolaudit(*command, "--help", cwd=cwd, COLUMNS="80")
    assert (done.status, done.err) == (0, "")
    return done.out


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_page_of_its_own(tmp_path: Path, command: str) -> None:
    text = page(command, cwd=tmp_path)
    assert text.startswith(f"Usage: poolaudit {command} ")
    for heading in ("  Exit status:\n    0  ", "  Examples:\n    ", "\nOptions:\n"):
        assert heading in text
    too_wide = [line for line in text.splitlines() if len(line) > 80]
    assert not too_wide
    example = text.partition("Examples:\n")[2].splitlines()[0]
    assert command in example


def test_the_front_page_lists_commands_by_task(tmp_path: Path) -> None:
    text = page(cwd=tmp_path)
    places = [text.index(f"\n{task}:\n") for task in TASKS]
    assert places == sorted(places)
    listed = [name for names in TASKS.values() for name in names]
    assert set(COMMANDS) <= set(listed) and len(listed) == len(set(listed))
    for name, summary in COMMANDS.items():
        assert f"\n  {name} " in text and summary.split()[0] in text
    assert all(len(line) <= 80 for line in text.splitlines())
