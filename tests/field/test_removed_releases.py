"""The look at trees without labels: what it takes out, and what it says was noticed."""

from pathlib import Path

from tests.field.removed_releases import Noticed, Tree, removals, without

POOL = """\
class PagePool:
    def __init__(self):
        self.idle = [bytearray(64) for _ in range(8)]

    def acquire(self):
        return self.idle.pop()

    def release(self, page):
        self.idle.append(page)


def copied(pool: PagePool, rows):
    page = pool.acquire()
    if not rows:
        pool.release(
            page,
        )
        return 0
    page[: len(rows)] = rows
    pool.release(page)
    return len(rows)


def warned(pool: PagePool, lock):
    lock.release()
    print("é"); pool.release(pool.acquire())
"""


def test_what_is_taken_out() -> None:
    every = removals("pool.py", POOL, rollbacks=False)
    assert sorted(each.line for each in every) == [15, 20, 26]
    [rollback] = removals("pool.py", POOL, rollbacks=True)
    assert rollback.line == 15
    assert without(POOL, rollback).splitlines()[14:18] == ["        pass", "", "", "        return 0"]
    [last] = [each for each in every if each.line == 26]
    assert without(POOL, last).splitlines()[25] == '    print("é"); pass'
    assert removals("bad.py", "def f(:\n", rollbacks=False) == []


def test_what_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "pool.py").write_text(POOL)
    (tmp_path / "work").mkdir()
    tree = Tree(tmp_path / "package", tmp_path / "work")
    rollback, *_ = removals("package/pool.py", POOL, rollbacks=True)
    [(_, seen)] = tree.noticed([rollback])
    assert seen == Noticed(("13: pool.acquire(), lost at 18",), ())
    assert (tmp_path / "work" / "package" / "pool.py").read_text() == POOL
