"""The quick ways through a syntax tree see what the slow ones of the standard library see."""

import ast
from pathlib import Path

import pytest

from auditor.source.nodes import children, every_node

_WORDS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
_FILES = sorted(Path(ast.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("share", range(4))
def test_children_are_those_of_the_grammar_but_for_operators_and_contexts(share: int) -> None:
    kinds = set()
    for file in _FILES[share::4]:
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if not isinstance(node, _WORDS):
                kinds.add(type(node))
                assert children(node) == [n for n in ast.iter_child_nodes(node) if not isinstance(n, _WORDS)]
    assert len(kinds) > 50


def test_every_node_is_visited_once() -> None:
    tree = ast.parse(Path(__file__).read_bytes())
    wanted = [node for node in ast.walk(tree) if not isinstance(node, _WORDS)]
    found = list(every_node(tree))
    assert len(found) == len(wanted)
    assert set(found) == set(wanted)


def test_what_a_hand_made_node_lacks_is_passed_over() -> None:
    made = ast.Call(ast.Name("f", ast.Load()), [], [])
    del made.keywords
    assert children(made) == [made.func]
