"""Bytes outside of edited statements never change: leaks planted into real files, whatever these look like.

The files are Python's own library and the installed packages', and odd ones made here. After a fix the file
is the old one but for the lines from the acquire to the end of its life, and in these nothing but margins and
the release are new.
"""

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from auditor.case import Parsed
from auditor.config import Settings
from auditor.engine import Request
from auditor.fixes.document import Document
from auditor.fixes.lines import indentation, indented, split
from auditor.fixing import plan_fixes
from auditor.model import Finding
from auditor.source.load import Unreadable, lines_of

PLANTED = ["def planted(pool, x):", "    lease = pool.allocate(x)", "    lease.use(x)", "    return 1"]
REPAIRED = [
    "def planted(pool, x):",
    "    lease = pool.allocate(x)",
    "    try:",
    "        lease.use(x)",
    "    finally:",
    "        pool.deallocate(lease)",
    "    return 1",
]
ODD = {
    "tabs": b"if 1:\n\tx = (1,\n\t\t2)\n",
    "crlf": b"a = 1\r\nb = '''x\r\ny'''\r\n",
    "cr": b"a = 1\rb = 2\r",
    "mixed": b"a = 1\r\nb = 2\nc = 3\r",
    "bom": b"\xef\xbb\xbfa = 1\n",
    "latin": b"# coding: latin-1\na = '\xe9\xff'\n",
    "shift_jis": "# coding: shift_jis\na = '\u8868\u793a'\n".encode("shift_jis"),
    "form feed": b"a = 1\n\x0c\nb = 2\n\x0cc = 3\n",
    "backslash": b"a = 1 + \\\n  2\nassert a, \\\n 'x'\n",
    "decorators": b"@property\n# why\n@staticmethod\ndef f(a, /, *, b=1): # type: (int) -> None\n  pass\n",
    "type comment": b"x = []  # type: list[int]\nfor y in x:  # type: int\n    pass\n",
    "pep 695": b"type X[T] = list[T]\ndef f[T](x: T) -> T: return x\nclass C[T: int]: pass\n",
    "pep 701": b'a = f"{"x" + f"{1}"}"\nb = f"""{\n  1  # one\n}"""\n',
    "notebook": b"#!/usr/bin/env python\n# coding: utf-8\n\n# In[1]:\n\n\nget_ipython\n\n\n# In[ ]:\n",
    "no newline at the end": b"a = 1",
    "lonely surrogates": b"a = '\\ud800'\n",
    "wide": "a = '\U0001f600\u00e9'; b = 1\n".encode(),
}


INSIDE = {
    "backslash": ["y = x + \\", "   1", "assert y, \\", "'no'"],
    "string over lines": ["y = '''a", "  b", "c'''", 'z = """\\', "d", '"""'],
    "brackets with margins of their own": ["y = [", "1,  # one", "      2]"],
    "decorators": ["@wraps(x)", "# why", "def inner():  # type: () -> None", "    pass"],
    "type comments": ["y = []  # type: list[int]", "for z in y:  # type: int", "    pass"],
    "form feed": ["\x0c", "y = 1"],
    "tabs between": ["y\t=\t(1,\t2)\t# \t"],
    "pep 695": ["def inner[T](a: T) -> T:", "    return a", "type Y[T] = list[T]"],
    "pep 701": ['y = f"{"x" + f"{1}"}"', 'z = f"""{', "  1  # one", '}"""'],
    "match": ["match x:", "    case [1, *_]:", "        pass"],
    "comments at other margins": ["# here", "y = 1"],
    "space at the end": ["y = 1   ", "   ", "z = 2\t"],
    "wide": ["y = '\U0001f600\u00e9'  # \u8868"],
}
"""What may stand between the acquire of a lease and its last use."""


def real_files() -> list[Path]:
    folders = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    files = sorted(
        file for folder in folders for file in folder.rglob("*.py") if file.stat().st_size < 60_000
    )
    return random.Random(7).sample(files, 60)


def sources() -> Iterator[tuple[str, bytes]]:
    yield from ODD.items()
    for file in real_files():
        yield file.name, file.read_bytes()


def fixed(file: Path) -> dict[str, Document]:
    def choose(finding: Finding, documents: Mapping[str, Document]) -> str:
        return ""

    settings = Settings(select=("PA101",))
    plan = plan_fixes(Request((str(file),), settings, file.parent), choose)
    return dict(plan.repaired.documents)


def planted(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """What stands before the plant (with an end of line), and the plant before and after its repair."""
    try:
        text = Document("x.py", data).text
    except Unreadable:
        return None
    document = Document("x.py", data)
    newline = document.newline.encode()
    head = data if data.endswith((b"\n", b"\r")) or not text else data + newline
    return (
        head,
        newline.join(line.encode() for line in PLANTED),
        newline.join(line.encode() for line in REPAIRED),
    )


@pytest.mark.slow
def test_only_the_statements_concerned_change(tmp_path: Path) -> None:
    changed = 0
    for number, (name, data) in enumerate(sources()):
        parts = planted(data)
        if parts is None:
            continue
        head, before, after = parts
        file = tmp_path / f"m{number}.py"
        file.write_bytes(head + before)
        documents = fixed(file)
        if documents:
            (document,) = documents.values()
            assert document.data == head + after, name
            changed += 1
        else:
            assert name not in ODD, name
    assert changed > 60


@pytest.mark.parametrize(
    ("unit", "newline"),
    [("    ", "\n"), ("\t", "\r\n"), ("  ", "\r")],
    ids=["four lf", "tab crlf", "two cr"],
)
@pytest.mark.parametrize("kind", INSIDE)
def test_what_stands_within_a_lease_is_moved_and_nothing_else(
    kind: str, newline: str, unit: str, tmp_path: Path
) -> None:
    """Every line of the old file is there, in its order, some one step further to the right."""
    body = ["lease = pool.allocate(x)", *INSIDE[kind], "lease.use(x)"]
    margins = [
        unit if text.strip() and not is_in_string(body, index) else "" for index, text in enumerate(body)
    ]
    lines = [
        "def before(): pass",
        "def planted(pool, x):",
        *(margin + text.replace("    ", unit) for margin, text in zip(margins, body, strict=True)),
        unit + "return 1",
        "after = 1 \\",
        " + 2",
        "",
    ]
    data = b"\xef\xbb\xbf" + newline.join(lines).encode()
    file = tmp_path / "odd.py"
    file.write_bytes(data)
    (document,) = fixed(file).values()
    old, new = split(data.decode()), split(document.data.decode())
    added = [
        unit + "try:" + newline,
        unit + "finally:" + newline,
        unit * 2 + "pool.deallocate(lease)" + newline,
    ]
    for line in added:
        assert new.count(line) == 1
        new.remove(line)
    assert len(new) == len(old)
    assert all(after in (before, unit + before) for before, after in zip(old, new, strict=True))
    assert new[:3] == old[:3]
    assert new[-3:] == old[-3:]


def is_in_string(lines: list[str], index: int) -> bool:
    """Whether a line begins within a string of triple quotes."""
    before = "\n".join(lines[:index])
    return before.count("'''") % 2 == 1 or before.count('"""') % 2 == 1


@pytest.mark.parametrize("file", real_files()[:25], ids=lambda file: file.name)
def test_any_function_body_can_be_indented_and_means_the_same(file: Path) -> None:
    """Each body one step deeper is the same syntax tree, strings and all; lines differ in margins only."""
    text = Document("x.py", file.read_bytes()).text
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(text)
    lines = split(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if lines[node.body[0].lineno - 1].encode()[: node.body[0].col_offset].strip():
            continue  # `) -> int: ...` has no body of its own lines
        decorators = getattr(node.body[0], "decorator_list", [])
        first = min([node.body[0].lineno, *(each.lineno for each in decorators)])
        body = lines[first - 1 : node.end_lineno]
        deeper = indented(body, "    ")
        if deeper is None:
            assert not lines_of(body[0])[0].startswith(" "), f"{file}:{first}"
            continue
        assert [line.lstrip() for line in deeper] == [line.lstrip() for line in body]
        wrapped = [*lines[: first - 1], indentation(body[0]) + "if 1:\n", *deeper]
        wrapped += lines[node.end_lineno or 0 :]
        with warnings.catch_warnings(action="ignore"):
            again = ast.parse("".join(wrapped))
        (same,) = [
            each.body[0].body
            for each in ast.walk(again)
            if isinstance(each, type(node))
            and each.lineno == node.lineno
            and isinstance(each.body[0], ast.If)
        ]
        assert [ast.dump(each) for each in same] == [ast.dump(each) for each in node.body]


def test_columns_of_trees_are_characters() -> None:
    text = "é = '\U0001f600'; name = 1\n"
    parsed = Parsed("x.py", text, lines_of(text), ast.parse(text), frozenset())
    assert parsed.source(parsed.tree.body[1]) == "name = 1"
