"""docs/tour.md: its commands, in its order, do what it says, but for those that need torch or a person."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.command_line import PROJECT, poolaudit

TOUR = (PROJECT / "docs" / "tour.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^    poolaudit (.+?)(?:\s+#.*)?$", re.MULTILINE)
ELSEWHERE = ("leaktests", "gate", "--interactive", "--diff-base")
STATUSES = {
    "audit longdoc": 1,
    "rule PA109": 0,
    "fix --diff longdoc": 1,
    "fix longdoc": 0,
    "fix --unsafe-fixes --diff longdoc": 1,
    "adopt --diff longdoc --class BlockSparseAttention": 1,
    "adopt longdoc --class BlockSparseAttention": 0,
    "audit longdoc --write-baseline poolaudit-baseline.json": 0,
    "audit longdoc --baseline poolaudit-baseline.json": 0,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tour(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "examples" / "longdoc", tmp_path / "longdoc")
    commands = [line for line in COMMAND.findall(TOUR) if not any(word in line for word in ELSEWHERE)]
    assert set(commands) == set(STATUSES)
    said = []
    for command in commands:
        done = poolaudit(*shlex.split(command), cwd=tmp_path, COLUMNS="80", NO_COLOR="1")
        assert done.status == STATUSES[command], (command, done.out, done.err)
        said.append(done)
        if command == "fix --unsafe-fixes --diff longdoc":  # whoever is asked says y to each
            answered = poolaudit("fix", "--unsafe-fixes", "longdoc", cwd=tmp_path)
            assert answered.status == 0, answered.err
    shown = TOUR.partition("that leaks:\n\n")[2].partition("\n\nBelow the findings")[0]
    assert re.sub("^    ", "", shown, flags=re.MULTILINE) in said[0].out
    after_adopting = said[commands.index("adopt longdoc --class BlockSparseAttention") + 1].out
    assert "PA304" in after_adopting and "PA302" not in after_adopting
