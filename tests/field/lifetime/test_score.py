"""The labelled snippets: their number and labels, what the rules find of them, how the scorer counts."""

from collections import Counter
from pathlib import Path

import pytest

from auditor.rule import all_rules
from tests.field.lifetime.score import GOAL, BadSnippet, Score, Snippet, read_snippets, score, scores

CODES = {rule.meta.code for rule in all_rules() if rule.meta.code.startswith("PA5")}


def test_sixty_snippets_half_of_them_leaks_each_after_a_thread() -> None:
    snippets = read_snippets()
    labels = Counter(bool(each.expected) for each in snippets)
    assert len(snippets) == 78
    assert labels == {True: 39, False: 39}
    assert {each.code for each in snippets} == CODES
    assert len({each.name for each in snippets}) == len(snippets)
    assert all(each.thread.startswith("https://github.com/") for each in snippets)
    assert sum(each.held_out for each in snippets) == 26


def test_precision_and_recall_are_above_the_goal_in_both_parts() -> None:
    results = scores()
    assert results.keys() == {"tuned", "held out"}
    for result in results.values():
        assert result.precision > GOAL, result.false
        assert result.recall > GOAL, result.missed


def _made_up(name: str, *lines: int) -> Snippet:
    return Snippet("PA501", name, "", "", frozenset((line, "PA501") for line in lines), held_out=False)


def test_a_wrong_line_is_a_miss_and_a_false_alarm() -> None:
    reports = {"a": {(3, "PA501")}, "b": {(9, "PA501")}, "c": {(1, "PA512")}}
    result = score([_made_up("a", 3), _made_up("b", 8), _made_up("c")], reports)
    assert result == Score(3, 1, ("PA501 b:8",), ("PA501 b:9", "PA512 c:1"))
    assert (result.recall, round(result.precision, 2)) == (0.5, 0.33)


def test_a_label_without_its_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pa501.txt").write_text("=== name leak https://github.com/a/b/issues/1\nx = 1\n")
    with pytest.raises(BadSnippet, match="PA501 name: labelled leak, but 0 lines are marked"):
        read_snippets(tmp_path)
