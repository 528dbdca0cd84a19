"""What the patterns of `match` ask of their subject, as the tests that `if` would ask, and what they bind."""

import ast
from collections.abc import Iterator, Sequence

from auditor.ir.ops import ANY_ITEM, Path

SUBJECT = "match~"
"""Begins the hidden name of a subject that has none."""


def subject_of(node: ast.Match) -> ast.expr:
    """By which its patterns ask for it."""
    inner: ast.expr = node.subject
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    hidden = ast.Name(f"{SUBJECT}{node.lineno}", ast.Load())
    return node.subject if isinstance(inner, ast.Name) else ast.copy_location(hidden, node.subject)


def asked_by(pattern: ast.pattern, subject: ast.expr) -> ast.expr | None:
    """None where it matches everything: `case Granted(ok=True, ticket=t)` asks `isinstance(x, Granted) and
    x.ok`."""
    match pattern:
        case ast.MatchAs(pattern=inner):
            return asked_by(inner, subject) if inner is not None else None
        case ast.MatchSingleton(value=None):
            return _compared(pattern, subject, ast.Is(), ast.Constant(None))
        case ast.MatchSingleton(value=value):
            return subject if value else _placed(pattern, ast.UnaryOp(ast.Not(), subject))
        case ast.MatchValue(value=value):
            return _compared(pattern, subject, ast.Eq(), value)
        case ast.MatchOr(patterns=patterns):
            known = [test for each in patterns if (test := asked_by(each, subject)) is not None]
            return _joined(pattern, ast.Or(), known) if len(known) == len(patterns) else None
        case ast.MatchClass(cls=cls):
            is_one = ast.Call(ast.Name("isinstance", ast.Load()), [subject, cls], [])
            return _joined(pattern, ast.And(), [_placed(pattern, is_one), *_of_parts(pattern, subject)])
        case ast.MatchSequence() | ast.MatchMapping():
            tests = _of_parts(pattern, subject)
            return _joined(pattern, ast.And(), tests) if tests else _opaque(pattern)
    return _opaque(pattern)


def bound(pattern: ast.pattern, place: Path) -> Iterator[tuple[ast.AST, str, Path]]:
    """The names that it binds, and where in the subject lies what they are bound to."""
    match pattern:
        case ast.MatchAs(pattern=inner, name=name):
            if name is not None:
                yield pattern, name, place
            if inner is not None:
                yield from bound(inner, place)
        case ast.MatchStar(name=str(name)):
            yield pattern, name, place
        case ast.MatchOr(patterns=[first, *_]):
            yield from bound(first, place)
        case _:
            for piece, inner in _parts(pattern):
                yield from bound(inner, (*place, piece) if not isinstance(inner, ast.MatchStar) else place)
            if isinstance(pattern, ast.MatchMapping) and pattern.rest is not None:
                yield pattern, pattern.rest, place


def sorts_alone(pattern: ast.pattern) -> bool:
    """It asks for nothing but a class, or for as many parts: where it comes last, the rest is meant."""
    match pattern:
        case ast.MatchAs(pattern=ast.pattern() as inner):
            return sorts_alone(inner)
        case ast.MatchClass() | ast.MatchSequence():
            return all(isinstance(inner, ast.MatchAs | ast.MatchStar) for _, inner in _parts(pattern))
    return False


def told_from_none(
    case: ast.match_case, later: Sequence[ast.match_case], subject: ast.expr
) -> ast.expr | None:
    """`subject is not None` of `case (address, _):`, where nothing but `case None:` comes after it."""
    rest = bool(later) and all(
        isinstance(each.pattern, ast.MatchSingleton) and each.pattern.value is None and each.guard is None
        for each in later
    )
    if not rest or case.guard is not None or not sorts_alone(case.pattern):
        return None
    return _compared(case.pattern, subject, ast.IsNot(), ast.Constant(None))


def _parts(pattern: ast.pattern) -> Iterator[tuple[str, ast.pattern]]:
    """As pieces of paths: `.ticket`, `[0]`."""
    match pattern:
        case ast.MatchClass(patterns=patterns, kwd_attrs=names, kwd_patterns=named):
            yield from ((f".{name}", inner) for name, inner in zip(names, named, strict=True))
            if len(patterns) == 1 and isinstance(pattern.cls, ast.Name) and pattern.cls.id in _ITSELF:
                yield "", patterns[0]
            else:
                yield from ((ANY_ITEM, inner) for inner in patterns)
        case ast.MatchSequence(patterns=patterns):
            starred = any(isinstance(inner, ast.MatchStar) for inner in patterns)
            yield from ((ANY_ITEM if starred else f"[{at}]", inner) for at, inner in enumerate(patterns))
        case ast.MatchMapping(keys=keys, patterns=patterns):
            for key, inner in zip(keys, patterns, strict=True):
                yield (f"[{key.value!r}]" if isinstance(key, ast.Constant) else ANY_ITEM), inner


_ITSELF = frozenset({"int", "str", "float", "bool", "bytes", "list", "tuple", "dict", "set", "bytearray"})
"""Classes whose only positional pattern is the subject itself."""


def _of_parts(pattern: ast.pattern, subject: ast.expr) -> list[ast.expr]:
    tests = (asked_by(inner, part) for inner, part in _parts_of(pattern, subject))
    return [test for test in tests if test is not None]


def _parts_of(pattern: ast.pattern, subject: ast.expr) -> Iterator[tuple[ast.pattern, ast.expr]]:
    """Those that an expression leads to."""
    match pattern:
        case ast.MatchClass(kwd_attrs=names, kwd_patterns=named):
            for name, inner in zip(names, named, strict=True):
                yield inner, _placed(pattern, ast.Attribute(subject, name, ast.Load()))
        case ast.MatchSequence(patterns=patterns) if not any(isinstance(p, ast.MatchStar) for p in patterns):
            for at, inner in enumerate(patterns):
                yield inner, _placed(pattern, ast.Subscript(subject, ast.Constant(at), ast.Load()))
        case ast.MatchMapping(keys=keys, patterns=patterns):
            for key, inner in zip(keys, patterns, strict=True):
                yield inner, _placed(pattern, ast.Subscript(subject, key, ast.Load()))


def _compared(pattern: ast.pattern, left: ast.expr, op: ast.cmpop, right: ast.expr) -> ast.expr:
    return _placed(pattern, ast.Compare(left, [op], [right]))


def _joined(pattern: ast.pattern, op: ast.boolop, tests: Sequence[ast.expr]) -> ast.expr:
    return tests[0] if len(tests) == 1 else _placed(pattern, ast.BoolOp(op, list(tests)))


def _opaque(pattern: ast.pattern) -> ast.expr:
    """Something else is asked, which may be so or not."""
    return _placed(pattern, ast.Name(f"pattern~{pattern.lineno}~{pattern.col_offset}", ast.Load()))


def _placed(pattern: ast.pattern, node: ast.expr) -> ast.expr:
    return ast.fix_missing_locations(ast.copy_location(node, pattern))
