"""The HTML report as a text: nothing is fetched, nothing breaks out, nothing is missing from the wheel."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.model import Run
from reports import _commands, _estimate
from reports._estimate import Powers, powers
from tests.fixtures.reports.page_runs import MARKUP, evil, page
from tests.fixtures.reports.sample_runs import EMPTY, HOSTILE, TYPICAL


@pytest.mark.parametrize("run", [TYPICAL, HOSTILE, EMPTY], ids=["typical", "hostile", "empty"])
def test_nothing_is_fetched(run: Run) -> None:
    text = page(run)
    outside = re.sub(r"(?s)<script.*?</script>", "", text)
    assert set(re.findall(r'<[^>]*\s(?:src|href)="(.)', outside)) <= {"#"}
    assert not re.search(r"url\(|@import", outside)
    assert "default-src 'none'" in text


def test_the_data_cannot_end_its_script() -> None:
    inside = re.search(r'(?s)<script type="application/json" id="data">(.*?)</script>', page(evil()))
    assert inside is not None
    assert "<" not in inside[1]
    document = json.loads(inside[1])
    assert document["findings"][0]["symbol"] == MARKUP
    assert document["classes"][0]["name"] == MARKUP


def test_two_renderings_are_one() -> None:
    assert page(TYPICAL) == page(TYPICAL)


def test_the_wheel_takes_templates_and_scripts_along() -> None:
    root = Path(__file__).parent.parent
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "reports"
    ]
    packed = {file for pattern in wanted for file in (root / "reports").glob(pattern)}
    there = {file for folder in ("templates", "static") for file in (root / "reports" / folder).iterdir()}
    assert packed == there


@pytest.mark.parametrize(
    ("expression", "size", "symbols"),
    [
        ("b*h*n*n*4", "4.0 GiB", ["b: batch 1", "h: heads 16", "n: length 8,192"]),
        ("b*n*n_q*n_k*4", "4.0 GiB", ["b: batch 1", "n: heads 16", "n_q: length 8,192", "n_k: length 8,192"]),
        ("x.numel()*2", "16.0 MiB", ["x.numel(): batch 1 * length 8,192 * width 1,024"]),
        ("3", "3 B", []),
        ("n*n*n", "1.0 GiB", ["n: heads 16, then length 8,192"]),
        ("*".join("cde" * 40), "1024 EiB", ["c: width 1,024", "d: width 1,024", "e: width 1,024"]),
    ],
)
def test_estimates_name_what_they_assume(expression: str, size: str, symbols: list[str]) -> None:
    assert _estimate.size(expression) == size
    assert [f"{symbol}: {value}" for symbol, value in _estimate.assumptions(expression)] == symbols


def test_commands_name_what_was_audited() -> None:
    (row,) = (row for row in TYPICAL.classes if row.support == "none")
    twin = replace(row, path="other dir/sparse.py")
    for paths, rows, expected in (
        (("longdoc", "my tests"), (row,), ["longdoc 'my tests' --class Sparse"]),
        (("-x\n",), (row,), ["'./-x\u240a' --class Sparse"]),
        (tuple("abcde"), (row,), ["longdoc/sparse.py --class Sparse"]),
        (("a",), (row, twin), ["longdoc/sparse.py --class Sparse", "'other dir/sparse.py' --class Sparse"]),
        (("-",), (row,), []),
        (("a",), (replace(row, edits=None), replace(row, support="partial")), []),
    ):
        run = replace(TYPICAL, paths=paths, classes=rows)
        assert list(_commands.adoptions(run).values()) == [
            f"poolaudit adopt --diff {end}" for end in expected
        ]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("b*h*n*n*4", Powers(4, batch=1, length=2, heads=1)),
        ("q.shape[:-1].numel()*k.shape[-2]*4", Powers(4, batch=1, heads=1, length=2)),
        ("hidden_states.numel()*4", Powers(4, batch=1, length=1, width=1)),
        ("bsz*self.num_heads*tgt_len*tgt_len*4", Powers(4, batch=1, heads=1, length=2)),
        ("batch_size*length*4*(self.max_num_bins + 1)*4", Powers(16, batch=1, length=1, width=1)),
        ("x.shape[0]*(a * b)*2", Powers(2, batch=1, width=1)),
        ("b*n*n_q*n_k*4", Powers(4, batch=1, heads=1, length=2)),
        ("", Powers()),
    ],
)
def test_estimates_grow_with_what_they_name(expression: str, expected: Powers) -> None:
    assert powers(expression) == expected
