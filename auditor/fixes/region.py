"""The stretch of a block that a lease's life takes up, from after its acquire to its release or last use."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from auditor.case import Parsed
from auditor.fixes.escape import Carriers
from auditor.fixes.life import (
    EXITS,
    Life,
    block_of,
    called_by,
    is_truth_of,
    leaves,
    mentions,
    statements_in,
    turns_back_if_none,
)
from auditor.protocols.vocabulary import LEASE_METHODS, RELEASE_WORDS, RELEASING, take_apart


@dataclass(frozen=True)
class Region:
    """`body` is what runs while the lease is held; `release` the statement after it that gives it back, if
    one does.

    `dropped` are releases within `body` that become superfluous once something at the end releases always.
    `after` are releases of other leases that stood before `release` and now come after it. `around`: the
    acquire is itself somewhere in `body`, under a condition, so that there may be no lease at the end.
    """

    life: Life
    block: Sequence[ast.stmt]
    body: Sequence[ast.stmt]
    release: ast.stmt | None
    dropped: tuple[ast.stmt, ...] = ()
    after: tuple[ast.stmt, ...] = ()
    around: bool = False
    alias: str = ""  # a second name for the lease, where the body gives the first another meaning

    @property
    def is_sure(self) -> bool:
        """Whether the statement before the body turns back where there is no lease."""
        index = list(self.block).index(self.body[0])
        return index > 0 and turns_back_if_none(self.block[index - 1], self.life.holder)

    @property
    def has_exits(self) -> bool:
        """Whether the body may be left by anything but its end and exceptions."""
        exits = (each for each in statements_in(self.body) if isinstance(each, EXITS))
        return any(leaves(each, self.body) and not isinstance(each, ast.Raise) for each in exits)

    @property
    def begins_at_once(self) -> bool:
        """Whether nothing stands between the acquire and the body."""
        block, first = self.life.block, self.life.index + 1
        return self.block is block and first < len(block) and block[first] is self.body[0]


def region_of(life: Life) -> Region | None:
    """None where the life does not keep to one block, or ends in a way that is not told by blocks."""
    if life.releases is None or not all(is_pure(each, life.holder) for each in life.releases):
        return None
    region = _from_acquire(life, life.releases)
    if life.is_receiver:  # what nobody here gives back may be meant to stay
        return region if region is not None and region.release is not None else None
    return region or _around_acquire(life, life.releases)


def is_pure(release: ast.stmt, holder: str) -> bool:
    """Whether the statement does nothing but give the lease back: it is named so, and given nothing else."""
    call = called_by(release)
    if call is None:
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    plain = not given or (len(given) == 1 and isinstance(given[0], ast.Name) and given[0].id == holder)
    verb = take_apart(name.lstrip("_"), RELEASE_WORDS) is not None
    return plain and (verb or name in LEASE_METHODS or RELEASING.fullmatch(name) is not None)


def _around_acquire(life: Life, releases: Sequence[ast.stmt]) -> Region | None:
    """The acquire stands under a condition, the release further out: the region holds the acquire too."""
    inner: ast.stmt = life.statement
    while isinstance(outer := life.file.parents[inner], ast.If):
        block = block_of(life.file, outer)
        later = list(block[list(block).index(outer) + 1 :]) if block else []
        ending = next((each for each in later if _is_ending(each, life, releases)), None)
        if ending is not None:
            body = [outer, *later[: later.index(ending)]]
            bound = [each for each in statements_in(life.function.body) if _binds_itself(life, each)]
            alone = {ending, *_plain_release(ending, life, releases)} >= set(releases)
            known = all(each is life.statement or _is_none(each) for each in bound)
            return Region(life, block, body, ending, around=True) if alone and known else None
        inner = outer
    return None


def _binds_itself(life: Life, statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(target is not None and life.binds(target) for target in targets)


def _is_none(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Constant) and value.value is None


def _from_acquire(life: Life, releases: Sequence[ast.stmt]) -> Region | None:
    """From after the acquire, in its own block or, where it ends a branch, in the one around."""
    placed = region_start(life)
    if placed is None:
        return None
    block, start = placed
    rest = list(block[start:])
    ending = next((each for each in rest if _is_ending(each, life, releases)), None)
    if ending is not None:
        body = rest[: rest.index(ending)]
    else:
        body = _as_long_as_used(life, rest)
    after: list[ast.stmt] = []
    while ending is not None and body and _releases_another(body[-1], ending, life):
        after.insert(0, body.pop())
    inner = set(statements_in(body))
    mine = {ending, *(_plain_release(ending, life, releases) if ending else ())}
    dropped = [each for each in releases if each not in mine]
    if not body or any(
        each not in inner or not _is_followed_by_exit(life.file, each, body) for each in dropped
    ):
        return None
    if any(life.binds(each) for each in body) or _used_elsewhere(life, block, start, body, ending):
        return None
    return Region(life, block, body, ending, tuple(dropped), tuple(after))


def region_start(life: Life) -> tuple[Sequence[ast.stmt], int] | None:
    """The block in which the life goes on, and where in it: after the acquire, after what asks whether there
    is a lease at all, and after the branches that the acquire is the end of."""
    block, index = life.block, life.index + 1
    while index < len(block) and turns_back_if_none(block[index], life.holder):
        index += 1
    while index == len(block):
        parent = life.file.parents[block[index - 1]]
        if life.is_receiver or not isinstance(parent, ast.If) or not (outer := block_of(life.file, parent)):
            return None
        block, index = outer, list(outer).index(parent) + 1
        while index < len(block) and turns_back_if_none(block[index], life.holder):
            index += 1
    return block, index


def _is_ending(statement: ast.stmt, life: Life, releases: Sequence[ast.stmt]) -> bool:
    """A release of this block, alone or under a condition that it shares with the acquire."""
    return statement in releases or bool(_plain_release(statement, life, releases))


def _plain_release(statement: ast.stmt, life: Life, releases: Sequence[ast.stmt]) -> tuple[ast.stmt, ...]:
    """The release in `if x is not None: release(x)`; the condition may be any that the body cannot change."""
    match statement:
        case ast.If(body=[only], orelse=[]) if only in releases:
            return (only,)
    return ()


def _as_long_as_used(life: Life, rest: list[ast.stmt]) -> list[ast.stmt]:
    """Up to the last statement that knows the lease or something made of it."""
    names = set(Carriers(life.holder, life.lease.value, rest).names)
    derived = names | {
        node.id
        for statement in rest
        if mentions(statement, names)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    last = max((index for index, each in enumerate(rest) if mentions(each, derived)), default=-1)
    return rest[: last + 1]


def _releases_another(statement: ast.stmt, ending: ast.stmt, life: Life) -> bool:
    """The release of another lease in the same words, just before ours: leases end in reverse order."""
    mine, other = called_by(ending), called_by(statement)
    if mine is None or other is None or life.mentions(statement):
        return False
    return _callee_of(mine, life.holder) == _callee_of(other, _argument(other))


def _argument(call: ast.Call) -> str:
    node = call.args[0] if call.args else getattr(call.func, "value", None)
    return node.id if isinstance(node, ast.Name) else ""


def _callee_of(call: ast.Call, lease: str) -> str:
    """The call's words with the lease left open."""
    text = ast.unparse(call)
    return "{}".join(text.rsplit(lease, 1)) if lease else text


def _is_followed_by_exit(file: Parsed, release: ast.stmt, body: Sequence[ast.stmt]) -> bool:
    """Whether what comes after the release does nothing with the lease and leaves the body."""
    block = list(block_of(file, release))
    onward = block[block.index(release) + 1 :]
    return bool(onward) and isinstance(onward[-1], EXITS) and leaves(onward[-1], body)


def _used_elsewhere(
    life: Life, block: Sequence[ast.stmt], start: int, body: Sequence[ast.stmt], ending: ast.stmt | None
) -> bool:
    """Whether somebody reads the holder after its life ended, in this block or around it."""
    if ending is not None:
        return False  # it was read after its release before, too
    covered = set(block[: start + len(body)])
    node: ast.AST = block[0]
    while node is not life.function:
        parent = life.file.parents[node]
        for name in ("body", "orelse", "finalbody", "handlers"):
            for each in getattr(parent, name, None) or ():
                later = isinstance(each, ast.AST) and getattr(each, "lineno", 0) > body[-1].lineno
                if later and each not in covered and life.mentions(each):
                    return True
        node = parent
    return False


def conditions_hold(region: Region) -> bool:
    """Whether the condition of a guarded release means the same after the body as at its place before."""
    if region.around or not isinstance(region.release, ast.If):
        return True
    test = region.release.test
    if any(isinstance(node, (ast.Call, ast.Await, ast.NamedExpr)) for node in ast.walk(test)):
        return False
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return is_truth_of(test, region.life.holder) or not any(
        isinstance(node, ast.Name) and node.id in names and not isinstance(node.ctx, ast.Load)
        for statement in region.body
        for node in ast.walk(statement)
    )
