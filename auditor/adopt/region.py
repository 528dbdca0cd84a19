"""Where a tensor lives: the statements of one block between its making and the last that can reach it."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from auditor.adopt.draft import Draft, Refused
from auditor.adopt.uses import Function, Trail, Uses

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_SOMETIMES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


@dataclass(frozen=True)
class Region:
    """`block[first]` makes the tensor, `block[last]` is the last that reaches it."""

    block: Sequence[ast.stmt]
    first: int
    last: int

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.first]


class Lives:
    """Finds the region of one tensor after the other in one method."""

    def __init__(self, draft: Draft, method: Function, uses: Uses) -> None:
        self._draft = draft
        self._parents = draft.parents
        self._method = method
        self._uses = uses
        self._names = [node for node in ast.walk(method) if isinstance(node, ast.Name)]

    def region(self, call: ast.Call) -> Region:
        """The region of what `call` makes. Raises Refused where the tensor leaves, or is kept."""
        statement = self._statement_of(call)
        block = self._block_of(statement)
        first = block.index(statement)
        trail, last, done = Trail(), first, 0
        self._uses.follow(call, trail)
        while done < len(trail.bound):
            name, value = trail.bound[done]
            done += 1
            for load in self._reached(name, value, block):
                last = max(last, self._place_in(block, load) or 0)
                parent = self._parents[load]
                if isinstance(parent, ast.AugAssign) and parent.target is load:
                    self._uses.written(parent, trail)
                else:
                    self._uses.follow(load, trail)
        if trail.records and trail.objections:
            raise Refused(f"{trail.objections[0]}, since `{trail.records[0]}` may have a gradient")
        if trail.bound and last == first:
            raise Refused("nothing uses it")
        return Region(block, first, last)

    def _statement_of(self, call: ast.Call) -> ast.stmt:
        """The statement that makes the tensor, each time that it runs and once."""
        node: ast.AST = call
        while not isinstance(node, ast.stmt):
            above = self._parents[node]
            if isinstance(above, ast.IfExp) and above.test is not node:
                raise Refused("it is made only under a condition inside of an expression")
            if isinstance(above, ast.BoolOp) and above.values[0] is not node:
                raise Refused("it is made only under a condition inside of an expression")
            if isinstance(above, _SOMETIMES):
                raise Refused("it is made inside of a comprehension or lambda")
            node = above
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return):
            raise Refused(f"it is made in the head of a compound statement ({type(node).__name__.lower()})")
        if any(
            isinstance(each, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for each in ast.walk(node)
        ):
            raise Refused("its statement assigns, awaits or yields on the way")
        return node

    def _block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        parent = self._parents[statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        raise Refused("its place in the code is not understood")

    def _reached(self, name: str, value: ast.AST, block: list[ast.stmt]) -> Iterator[ast.Name]:
        """Every place that may read `name` while it still stands for the tensor that it was bound to."""
        binding = self._own_statement(value)
        rebound = self._rebound(name, block, self._place_in(block, binding) or 0)
        for node in self._reads(name):
            place = self._place_in(block, node)
            if rebound is not None and (place is None or place > rebound):
                continue
            if place is None:
                self._outside(node, block)
            elif self._runs_after(node, binding) or self._turns_back(node, binding, block):
                if self._scope(node) is not self._method:
                    raise Refused(f"`{name}` is captured by a nested function")
                yield node
            elif self._loops(block[0], self._method):
                raise Refused(f"`{name}` is read again in the next turn of a loop")

    def _reads(self, name: str) -> Iterator[ast.Name]:
        """Where the name is read; `name += x` reads it too, and keeps the tensor."""
        for node in self._names:
            if node.id == name and (isinstance(node.ctx, ast.Load) or _is_augmented(node, self._parents)):
                yield node

    def _own_statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def _place_in(self, block: list[ast.stmt], node: ast.AST) -> int | None:
        """The index of the statement of `block` that holds `node`."""
        places = {id(statement): index for index, statement in enumerate(block)}
        while node is not self._method:
            if id(node) in places:
                return places[id(node)]
            node = self._parents[node]
        return None

    def _rebound(self, name: str, block: list[ast.stmt], at: int) -> int | None:
        """The first statement of the block itself after `at` that gives the name another value."""
        for index in range(at + 1, len(block)):
            match block[index]:
                case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                    if any(_is_name(each, name) for each in targets):
                        return index
                case ast.AnnAssign(target=target, value=ast.expr()) if _is_name(target, name):
                    return index
        return None

    def _outside(self, node: ast.Name, block: list[ast.stmt]) -> None:
        """A read before the block, or in the other branch, sees nothing of ours but through a loop."""
        around = {id(loop) for loop in self._loops(block[0], self._method)}
        if any(id(loop) in around for loop in self._loops(node, self._method)):
            raise Refused(f"`{node.id}` is used outside of the block that makes it, in the same loop")
        if self._draft.start(node) > self._draft.end(block[-1]) and not self._excludes(node, block):
            raise Refused(f"`{node.id}` is used outside of the block that makes it")

    def _excludes(self, node: ast.AST, block: list[ast.stmt]) -> bool:
        """Whether the read stands in another branch of an `if` than the block."""
        while node is not self._method:
            parent = self._parents[node]
            if isinstance(parent, ast.If) and self._holds(parent, block):
                return not any(
                    self._holds_in(branch, block) and node in branch for branch in _branches(parent)
                )
            node = parent
        return False

    def _holds(self, statement: ast.stmt, block: list[ast.stmt]) -> bool:
        node: ast.AST = block[0]
        while node is not self._method:
            node = self._parents[node]
            if node is statement:
                return True
        return False

    def _holds_in(self, branch: list[ast.stmt], block: list[ast.stmt]) -> bool:
        return branch is block or any(self._holds(each, block) for each in branch)

    def _turns_back(self, node: ast.AST, binding: ast.stmt, block: list[ast.stmt]) -> bool:
        """Whether a loop inside of the block holds both: its next turn reads what this one bound."""
        end = self._parents[block[0]]
        inner = {id(loop) for loop in self._loops(binding, end)}
        return any(id(loop) in inner for loop in self._loops(node, end))

    def _loops(self, node: ast.AST, end: ast.AST) -> list[ast.AST]:
        """The loops around `node`, below `end`."""
        found: list[ast.AST] = []
        while node is not end:
            node = self._parents[node]
            if isinstance(node, _LOOPS) and node is not end:
                found.append(node)
        return found

    def _runs_after(self, node: ast.Name, binding: ast.stmt) -> bool:
        """Whether the read comes after the binding in the text, which is not so inside of the binding."""
        if isinstance(binding, ast.For):
            return self._draft.start(node) > self._draft.end(binding.iter)
        return self._draft.start(node) > self._draft.end(binding)

    def _scope(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, _SCOPES):
            node = self._parents[node]
        return node


def _is_augmented(node: ast.Name, parents: Mapping[ast.AST, ast.AST]) -> bool:
    return isinstance(parents[node], ast.AugAssign)


def _branches(statement: ast.If) -> tuple[list[ast.stmt], list[ast.stmt]]:
    return statement.body, statement.orelse


def _is_name(node: ast.expr, name: str) -> bool:
    if isinstance(node, ast.Tuple | ast.List):
        return any(_is_name(each, name) for each in node.elts)
    return isinstance(node, ast.Name) and node.id == name
