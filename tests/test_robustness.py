"""Absurd input through the command line: it costs one named file, never the run, never a traceback."""

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planted import LEAK, LEAK_LINE, PLANTED, audit, readable, tree_with_a_leak


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return tree_with_a_leak(tmp_path)


def _with_leak(text: str) -> bytes:
    """The absurd text and, below it, a leak that the pre-filter cannot pass over."""
    return (text + "\n\n" + LEAK).encode()


def _own_leak(text: str, name: str = "absurd.py") -> tuple[str, int, str]:
    return (name, text.count("\n") + 2 + LEAK_LINE, "PA101")


UNREADABLE = {
    "null byte": b"x = 1\0\n\n" + LEAK.encode(),
    "5,000 parentheses": _with_leak("x = " + "(" * 5000 + ")" * 5000),
    "5,000 brackets": _with_leak("x = " + "[" * 5000 + "]" * 5000),
    "unclosed parentheses": _with_leak("(" * 100_000),
    "1,000 blocks": _with_leak(
        "\n".join(" " * i + "if x:" for i in range(1000)) + "\n" + " " * 1000 + "pass"
    ),
    "1,000 nested calls": _with_leak("x = " + "f(" * 1000 + ")" * 1000),
    "syntax error": b"def broken(:\n\n" + LEAK.encode(),
    "python 2": b"print 'hello'\n\n" + LEAK.encode(),
    "not utf-8": b"x = '\xff\xfe\xfa'\n\n" + LEAK.encode(),
    "utf-16": LEAK.encode("utf-16"),
    "unknown codec": b"# -*- coding: no-such-codec -*-\n\n" + LEAK.encode(),
    "codec that is no text": b"# -*- coding: base64 -*-\n\n" + LEAK.encode(),
    "tabs and spaces": b"if x:\n\ty = 1\n        z = 2\n\n" + LEAK.encode(),
    "binary": bytes(range(256)) * 64 + LEAK.encode(),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_python_cannot_read_is_a_named_failure(tree: Path, name: str) -> None:
    (tree / "absurd.py").write_bytes(UNREADABLE[name])
    with pytest.raises((SyntaxError, ValueError, MemoryError, RecursionError)):
        compile(UNREADABLE[name], "absurd.py", "exec")
    said = audit(tree)
    assert (said.status, said.findings, said.failed) == (2, {PLANTED}, {"absurd.py"})


DEEP = {
    "a.b().c() 3,000 long": "x = a" + ".b()" * 3000,
    "1,000 attributes": "x = a" + ".b" * 1000,
    "3,000 subscripts": "x = a" + "[0]" * 3000,
    "5,000 additions": "x = " + " + ".join(["1"] * 5000),
    "5,000 ands": "x = " + " and ".join(["y"] * 5000),
    "3,000 elifs": "if x:\n    pass\n" + "\n".join(f"elif x == {i}:\n    pass" for i in range(3000)),
    "90 blocks": "\n".join(" " * i + "if x:" for i in range(90)) + "\n" + " " * 90 + "pass",
    "90 functions": "\n".join(" " * i + f"def f{i}(x):" for i in range(90)) + "\n" + " " * 90 + "pass",
    "90 parentheses": "x = " + "(" * 90 + "1" + ")" * 90,
    "1,000 nots": "x = " + "not " * 1000 + "y",
    "1,000 lambdas": "x = " + "lambda: " * 1000 + "1",
    "1,000 conditional expressions": "x = " + "1 if y else " * 1000 + "0",
    "a line of a million characters": "x = '" + "y" * 1_000_000 + "'",
    "20 nested loops": "\n".join(" " * i + f"for i{i} in x:" for i in range(20)) + "\n" + " " * 20 + "pass",
    "19 nested tries": "\n".join(" " * i + "try:" for i in range(19))
    + "\n"
    + " " * 19
    + "pass\n"
    + "\n".join(" " * i + "finally:\n" + " " * (i + 1) + "pass" for i in reversed(range(19))),
}


@pytest.mark.parametrize("name", DEEP)
def test_what_is_deep_is_analysed_or_named(tree: Path, name: str) -> None:
    """Never passed over in silence: its own leak is found, or the file is among the failures."""
    (tree / "absurd.py").write_bytes(_with_leak(DEEP[name]))
    said = audit(tree)
    if said.failed:
        assert (said.status, said.findings, said.failed) == (2, {PLANTED}, {"absurd.py"})
    else:
        assert (said.status, said.findings) == (1, {PLANTED, _own_leak(DEEP[name])})


def _branches(count: int) -> str:
    """One function whose ways double with each line, were they counted one by one."""
    body = "\n".join(f"    if c{i}:\n        buf[{i}] = x" for i in range(count))
    names = ", ".join(f"c{i}" for i in range(count))
    return f"def many(pool, x, {names}):\n    buf = pool.acquire(8)\n{body}\n    return x\n"


def test_many_branches_end_in_one_finding(tree: Path) -> None:
    (tree / "branches.py").write_text(_branches(200))
    said = audit(tree)
    assert (said.status, said.findings, said.failed) == (1, {PLANTED, ("branches.py", 2, "PA101")}, set())


def test_many_leases_in_one_function(tree: Path) -> None:
    lines = ["def many(pool):", *(f"    b{i} = pool.acquire({i})" for i in range(100))]
    (tree / "leases.py").write_text("\n".join(lines) + "\n")
    said = audit(tree)
    wanted = {("leases.py", line, "PA101") for line in range(2, 102)}
    assert (said.status, said.findings, said.failed) == (1, {PLANTED, *wanted}, set())


def _call_chain(length: int) -> str:
    """`f0` calls `f1` calls ... the last one acquires; only whoever calls `f0` can lose it."""
    links = [f"def _f{i}(pool):\n    return _f{i + 1}(pool)\n" for i in range(length)]
    last = f"def _f{length}(pool):\n    return pool.acquire(8)\n"
    return "\n".join([*links, last]) + "\n\ndef use(pool):\n    buf = _f0(pool)\n    buf[0] = 1\n"


@pytest.mark.parametrize("length", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_lease_through_a_chain_of_functions(tree: Path, length: int) -> None:
    text = _call_chain(length)
    (tree / "chain.py").write_text(text)
    said = audit(tree)
    use = ("chain.py", text.count("\n") - 1, "PA101")
    assert (said.status, said.findings, said.failed) == (1, {PLANTED, use}, set())


@pytest.mark.parametrize("length", [50, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_ring_of_functions_that_call_each_other(tree: Path, length: int) -> None:
    links = [
        f"def g{i}(pool, n):\n    return g{(i + 1) % length}(pool, n - 1) if n else None\n"
        for i in range(length)
    ]
    (tree / "ring.py").write_text("\n".join(links) + "\n" + LEAK)
    said = audit(tree)
    own = ("ring.py", 3 * length + LEAK_LINE, "PA101")
    assert (said.status, said.findings, said.failed) == (1, {PLANTED, own}, set())


@pytest.mark.slow
def test_a_file_of_fifty_thousand_lines(tree: Path) -> None:
    """Of which every hundredth acquires: what each costs is another test's."""
    head = "def f{0}(pool, x):\n    buf = pool.acquire({0})\n"
    body = "    if x:\n        pool.release(buf)\n    return x\n"
    block = head + body + "TABLE = [{0}, len(str({0}))]\n" * 95
    (tree / "long.py").write_text("".join(block.format(i) for i in range(500)))
    said = audit(tree, timeout=280)
    wanted = {("long.py", 100 * i + 2, "PA102") for i in range(500)}
    assert (said.status, said.failed) == (1, set())
    assert said.findings == {PLANTED, *wanted}


SHARE = 4
"""One module or package of the library in so many, and of its test suite only the files that are wrong on
purpose; all of both in `make fuzz`."""


def _parts_of_the_library() -> Iterator[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    whole = "POOLAUDIT_FUZZ" in os.environ
    for part in sorted(library.iterdir()):
        if part.name == "test" and not whole:
            found = sorted(part.rglob("*.py"))
            wrong = [file for file in found if file.is_file() and not readable(file.read_bytes())]
            assert wrong, "no file of the test suite is wrong"
            yield from wrong
        elif part.name not in ("site-packages", "__pycache__") and (part.is_dir() or part.suffix == ".py"):
            yield from [part] if whole or zlib.crc32(part.name.encode()) % SHARE == 0 else ()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")  # of what it compiles
def test_the_standard_library(tree: Path) -> None:
    """Its test suite keeps files that are wrong on purpose; only those may fail, and each by name."""
    parts = list(_parts_of_the_library())
    said = audit(tree, ".", *map(str, parts), timeout=1100)
    assert said.status in (1, 2)
    assert PLANTED in said.findings
    for path in said.failed:
        assert not readable(Path(os.path.normpath(tree / path)).read_bytes()), path
    assert (said.status == 2) == bool(said.failed)


SEVERAL = """

class Part:
    def __init__(self, row):
        self.row = row


def several(pool, rows):
    out = []
    for row in rows:
        out.append(Part(pool.acquire(row)))
    shown0(out)
    return out


def lost(pool, rows):
    return len(several(pool, rows))
"""


def test_a_chain_of_calls_with_more_ways_through_than_can_be_counted(tree: Path) -> None:
    """Each of forty functions shows the list to the next one, twice."""
    chain = "\n".join(f"\n\ndef shown{i}(a):\n    shown{i + 1}(a)\n    shown{i + 1}(a)" for i in range(40))
    text = SEVERAL + chain + "\n\n\ndef shown40(a):\n    print(len(a))\n"
    (tree / "ways.py").write_text(text)
    said = audit(tree)
    line = text[: text.index("len(several(")].count("\n") + 1
    assert (said.status, said.findings, said.failed) == (1, {PLANTED, ("ways.py", line, "PA104")}, set())
