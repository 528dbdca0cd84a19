"""Fields that a method fills where they are empty, and fills again over what is there: that one store loses
what either of them took, and is told once, of the acquire that puts another lease there."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace

from auditor.flow.lease import Leak, Loss
from auditor.model import Span
from auditor.project.outcome import Outcome


def told_of_what_is_put_over(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Without what is lost where another call like it stores what it took, over its own last one, too."""
    outcomes = list(outcomes)
    losing = [each for each in outcomes if any(map(_is_put_over, each.lease.leaks))]
    return [_without_the_others(each, losing) for each in outcomes]


def _without_the_others(outcome: Outcome, losing: Sequence[Outcome]) -> Outcome:
    elsewhere = {
        leak.at
        for other in losing
        if other.function is outcome.function and _is_alike(outcome, other)
        for leak in other.lease.leaks
        if _is_put_over(leak) and _lies_there(other.lease.span, leak.at)
    }
    left = tuple(each for each in outcome.lease.leaks if not (_is_put_over(each) and each.at in elsewhere))
    if len(left) == len(outcome.lease.leaks):
        return outcome
    return replace(outcome, lease=replace(outcome.lease, leaks=left))


def _is_alike(one: Outcome, other: Outcome) -> bool:
    return one.call is not other.call and ast.dump(one.call) == ast.dump(other.call)


def _is_put_over(leak: Leak) -> bool:
    return leak.loss is Loss.OVERWRITTEN


def _lies_there(acquire: Span, store: Span) -> bool:
    """`self.page = pool.take()` stores what it takes."""
    return (acquire.path, acquire.line) == (store.path, store.line)
