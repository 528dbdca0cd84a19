"""Baselines: known findings by fingerprint, as a multiset."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.baseline import BaselineError, read_baseline, unknown, write_baseline
from auditor.model import Finding, Severity, Span
from tests.command_line import UNUSED, places, poolaudit


def finding(line: int, fingerprint: str) -> Finding:
    return Finding(
        "PA101", "n", Severity.ERROR, Span("a.py", line, 1, line, 2), "f", "m", fingerprint=fingerprint
    )


def test_round_trip_and_multiset(tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    write_baseline(file, [finding(1, "x"), finding(2, "x"), finding(3, "y")])
    known = read_baseline(file)
    assert [entry.fingerprint for entry in known] == ["x", "x", "y"]
    now = [finding(11, "x"), finding(12, "x"), finding(13, "x"), finding(14, "z"), finding(15, "y")]
    assert [f.span.line for f in unknown(now, known)] == [13, 14]


def test_a_renamed_function_is_known_by_its_acquire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").touch()
    file = tmp_path / "known.json"
    write_baseline(file, [finding(1, "aaaaaaaa" + "11111111"), finding(2, "aaaaaaaa" + "22222222")])
    known = read_baseline(file)
    renamed = finding(1, "aaaaaaaa" + "33333333")
    assert unknown([renamed, finding(2, "aaaaaaaa" + "22222222")], known) == []
    third = finding(9, "aaaaaaaa" + "44444444")
    assert unknown([renamed, finding(2, "aaaaaaaa" + "22222222"), third], known) == [third]
    elsewhere = replace(renamed, span=replace(renamed.span, path="b.py"))
    assert unknown([elsewhere], known) == [elsewhere]  # the old file is still there
    Path("a.py").unlink()
    assert unknown([elsewhere], known) == []
    other = finding(1, "bbbbbbbb" + "11111111")
    assert unknown([other], known) == [other]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 1}', '{"version": 2, "findings": []}', "[" * 100_000]
)
def test_not_a_baseline(tmp_path: Path, text: str) -> None:
    file = tmp_path / "known.json"
    file.write_text(text)
    with pytest.raises(BaselineError, match=r"known\.json: "):
        read_baseline(file)


def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    written = poolaudit("audit", "--write-baseline", "known.json", "--format", "json", cwd=tmp_path)
    assert (written.status, places(written.json)) == (0, [])
    (tmp_path / "a.py").write_text("\n\n" + UNUSED)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    known = poolaudit("audit", "--baseline", "known.json", "--format", "json", cwd=tmp_path)
    assert (known.status, places(known.json)) == (0, [])
    assert known.json["summary"]["findings"] == {}
    (tmp_path / "b.py").write_text(UNUSED + "y = 2  # poolaudit: ignore[PA301]\n")
    new = poolaudit("audit", "--baseline", "known.json", "--format", "json", cwd=tmp_path)
    assert (new.status, places(new.json)) == (1, [("b.py", 2, "PA002")])


def test_from_the_settings_relative_to_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text(UNUSED)
    poolaudit("audit", "--write-baseline", "../known.json", cwd=tmp_path / "sub")
    (tmp_path / "poolaudit.toml").write_text("baseline = 'known.json'\n")
    assert poolaudit("audit", cwd=tmp_path / "sub").status == 0
    assert poolaudit("audit", "--isolated", cwd=tmp_path / "sub").status == 1


def test_missing_baseline(tmp_path: Path) -> None:
    done = poolaudit("audit", "--baseline", "gone.json", cwd=tmp_path)
    assert done.status == 2
    assert "gone.json: cannot be read: No such file or directory" in done.err


LEAKY = """
class Layer{n}:
    def forward(self, pool, x):
        part = pool.acquire( x.shape[0],x.shape[1] , name='part {n}', dtype = (x.dtype), # {n}
                 )
        part[0]=x; return x+{n}
    def early(self, pool, x):
        first=pool.acquire({n},8,name='a name so long that the formatter has to break this line', dtype=x)
        if x is None: return
        pool.release(first)
def helper_{n}(pool, x):
    pool.acquire(0X{n:X},len('{n}'))
    y = pool.acquire(1, 2)
    y = pool.acquire(1, 2)
    y[0]=x
"""
FILES = 100


def _tree(root: Path) -> None:
    for n in range(FILES):
        (root / f"layer_{n}.py").write_text(LEAKY.format(n=n))


def _move_rename_reformat(root: Path) -> None:
    """Files into other folders, under other names, below other code, formatted; in some, classes renamed."""
    for n in range(FILES):
        old = root / f"layer_{n}.py"
        text = '"""A docstring."""\n\nimport os\n\nROOT = os.sep\n' + old.read_text()
        if n % 4 == 0:
            text = text.replace(f"Layer{n}", f"Block{n}").replace(f"helper_{n}", f"assist_{n}")
            new = old
        else:
            new = root / f"package_{n % 7}" / "deeper" / f"module_{n}.py"
            new.parent.mkdir(parents=True, exist_ok=True)
            old.unlink()
        new.write_text(text)
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "79", str(root)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.slow
def test_survives_moving_renaming_and_reformatting(tmp_path: Path) -> None:
    _tree(tmp_path)
    before = poolaudit("audit", "--isolated", "--format", "json", cwd=tmp_path).json["findings"]
    assert len(before) == 5 * FILES
    poolaudit("audit", "--isolated", "--write-baseline", "known.json", cwd=tmp_path)
    _move_rename_reformat(tmp_path)
    after = poolaudit("audit", "--isolated", "--format", "json", cwd=tmp_path).json["findings"]
    assert len(after) == len(before)
    assert {(f["path"], f["line"]) for f in after}.isdisjoint({(f["path"], f["line"]) for f in before})
    known = poolaudit("audit", "--isolated", "--baseline", "known.json", "--format", "json", cwd=tmp_path)
    assert (known.status, places(known.json)) == (0, [])
    fresh = tmp_path / "package_1" / "deeper" / "module_1.py"
    fresh.write_text(fresh.read_text() + "\n\ndef helper_1b(pool):\n    pool.acquire(1, 2)\n")
    new = poolaudit("audit", "--isolated", "--baseline", "known.json", "--format", "json", cwd=tmp_path)
    assert [(f["path"], f["symbol"], f["code"]) for f in new.json["findings"]] == [
        ("package_1/deeper/module_1.py", "helper_1b", "PA104")
    ]


def test_survives_a_file_and_its_classes_renamed_at_once(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(LEAKY.format(n=1))
    (tmp_path / "stays.py").write_text("def keep(pool):\n    pool.acquire(1, 2)\n")
    poolaudit("audit", "--isolated", "--write-baseline", "known.json", cwd=tmp_path)
    (tmp_path / "old.py").unlink()
    text = LEAKY.format(n=1).replace("Layer1", "Block").replace("helper_1", "assist")
    (tmp_path / "new.py").write_text(text)
    known = poolaudit("audit", "--isolated", "--baseline", "known.json", "--format", "json", cwd=tmp_path)
    assert (known.status, places(known.json)) == (0, [])
    (tmp_path / "new.py").write_text(text + "\n\ndef more(pool):\n    pool.acquire(1, 2)\n")
    (tmp_path / "stays.py").write_text(
        "def keep(pool):\n    pool.acquire(1, 2)\n    pool.acquire(0X1,len('1'))\n"
    )
    new = poolaudit("audit", "--isolated", "--baseline", "known.json", "--format", "json", cwd=tmp_path)
    assert [(f["path"], f["symbol"]) for f in new.json["findings"]] == [
        ("new.py", "more"),
        ("stays.py", "keep"),
    ]
