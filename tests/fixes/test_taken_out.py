"""What a method takes out of a table and loses: told of the acquire, repaired in the method, in whatever
file."""

from pathlib import Path

import pytest

from tests.command_line import poolaudit
from tests.fixes.test_fix_command import fix
from tests.fixes.test_fix_fixtures import fixed

POOLS = """\
class Row:
    def __init__(self, pool):
        self.pool, self.data = pool, bytearray(8)

    def give_back(self):
        self.pool.put_row(self)


class Pool:
    def __init__(self):
        self.free = []

    def take_row(self) -> Row:
        return self.free.pop() if self.free else Row(self)

    def put_row(self, row: Row):
        self.free.append(row)


"""
USED = "def warm(pool: Pool):\n    row = pool.take_row()\n    row.give_back()\n\n\n"
TABLE = """\
class Table:
    def __init__(self, pool: Pool):
        self.pool, self.rows = pool, {}

"""
STAGE = """\
    def stage(self, key):
        row = self.pool.take_row()
        self.rows[key] = row

"""
FINISH = """\
    def finish(self, key, cancelled):
        row = self.rows.pop(key)
        if cancelled:
            return None
        key.write(row.data)
        row.give_back()
        return key
"""
FINISHED = """\
    def finish(self, key, cancelled):
        row = self.rows.pop(key)
        try:
            if cancelled:
                return None
            key.write(row.data)
        finally:
            row.give_back()
        return key
"""
KEEP = """\

    def keep(self, key, good):
        row = self.rows.pop(key)
        if good:
            key.write(row.data)
            row.give_back()
"""
RESET = "\n    def reset(self):\n        self.rows.clear()\n"
NAMELESS = FINISH.replace("row = self.rows.pop(key)", "row, late = self.rows.pop(key), key.late")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            POOLS + USED + TABLE + STAGE + FINISH + KEEP,
            "where `Table.keep` takes it out, `row` is used, or may live on, beyond the block that acquires",
        ),
        (
            POOLS + USED + TABLE + STAGE + FINISH + RESET,
            "it is lost at another place too, where no fix could be built",
        ),
        (
            POOLS + USED + TABLE + STAGE + NAMELESS,
            "where `Table.finish` takes it out, no local name of its own stands for what was acquired",
        ),
        (
            POOLS + TABLE + STAGE + FINISH,
            "where `Table.finish` takes it out, neither the project nor the settings say how it is given",
        ),
    ],
    ids=["a method without a fix", "cleared too", "no name", "no words"],
)
def test_what_stands_in_the_way_where_it_is_taken_out_is_said(text: str, said: str, tmp_path: Path) -> None:
    changed, plan = fixed(tmp_path / "code.py", text, "PA110")
    assert changed == text
    (left,) = plan.repaired.left
    assert left.reason.startswith(f"no fix could be built: {said}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The acquire is in staged.py, what loses it in base.py."""
    (tmp_path / "pools.py").write_text(POOLS + USED)
    (tmp_path / "base.py").write_text("from pools import Pool\n\n\n" + TABLE + FINISH)
    (tmp_path / "staged.py").write_text("from base import Table\n\n\nclass Staged(Table):\n" + STAGE)
    return tmp_path


def test_the_method_may_be_in_another_file(tree: Path) -> None:
    done = fix(tree)
    assert (done.status, done.err) == (
        0,
        "Fixed     staged.py:6: PA110 container-never-drained\n"
        "          in `Table.finish` of base.py: try/finally around the life of `row`\n"
        "Fixed 1 finding in 1 file; none left.\n",
    )
    assert (tree / "base.py").read_text() == "from pools import Pool\n\n\n" + TABLE + FINISHED
    assert fix(tree).err == "Nothing to fix.\n"


def test_the_diff_names_the_file_that_changes(tree: Path) -> None:
    done = fix(tree, "--diff")
    assert done.status == 1
    assert [line for line in done.out.splitlines() if line.startswith("+++")] == ["+++ b/base.py"]
    assert (tree / "base.py").read_text().endswith(FINISH)


def test_a_file_that_cannot_be_written_keeps_the_finding(tree: Path) -> None:
    (tree / "base.py").chmod(0o444)
    done = fix(tree)
    assert done.status == 1
    assert "base.py" in done.err
    assert (tree / "base.py").read_text().endswith(FINISH)


def test_machines_are_told_the_edit_where_it_is(tree: Path) -> None:
    options = ("--isolated", "--no-cache", "--select", "PA110")
    found = poolaudit("audit", *options, "--format", "json", cwd=tree).json["findings"]
    described = "in `Table.finish` of base.py: try/finally around the life of `row`"
    assert [each["fix"] for each in found] == [{"safety": "safe", "description": described}]
    (run,) = poolaudit("audit", *options, "--format", "sarif", cwd=tree).json["runs"]
    ((change,),) = ([*each["fixes"][0]["artifactChanges"]] for each in run["results"])
    assert change["artifactLocation"]["uri"] == "base.py"
