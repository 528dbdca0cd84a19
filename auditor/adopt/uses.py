"""What becomes of a tensor in the method that makes it: does it stay, and who else names its memory?"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from auditor.adopt import operations as op
from auditor.adopt.draft import Refused
from auditor.adopt.factory import is_number
from auditor.source.imports import dotted_text

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Trail:
    """What has been seen of one tensor: names bound to its memory, and what autograd may make of it.

    `bound` are the names with the nodes whose values they were given. `records` says what writes a value
    into it that may have a gradient; `objections` what must not happen to a tensor of which that is true.
    """

    bound: list[tuple[str, ast.AST]] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)

    def bind(self, name: str, value: ast.AST) -> None:
        """A name for the tensor; met again in a loop it is nothing new."""
        if not any(name == known and value is met for known, met in self.bound):
            self.bound.append((name, value))


@dataclass(frozen=True)
class Uses:
    """One method's tree, walked upward from each place where the tensor is read."""

    parents: Mapping[ast.AST, ast.AST]
    origins: Mapping[str, str]
    method: Function

    def follow(self, node: ast.expr, trail: Trail) -> None:
        """What becomes of the tensor that `node` evaluates to. Raises Refused where it leaves or is kept."""
        parent = self.parents[node]
        match parent:
            case ast.Assign(targets=targets):
                self._bind(targets, node, trail)
            case ast.AnnAssign(target=ast.Name(id=name)):
                trail.bind(name, node)
            case ast.AugAssign(op=operator):
                self._operand(operator, parent, parent.target, trail)
            case ast.Attribute():
                self._attribute(parent, trail)
            case ast.keyword():
                self._keyword(parent, trail)
            case ast.Call(func=function) if function is not node:
                self._argument(parent, node, trail)
            case ast.Subscript(value=value) if value is node:
                self._item(parent, trail)
            case ast.BinOp(left=left, op=operator, right=right):
                self._operand(operator, parent, right if left is node else left, trail)
            case ast.UnaryOp() | ast.Compare() | ast.Expr() | ast.Delete() | ast.Assert():
                pass
            case ast.If() | ast.While() | ast.FormattedValue():
                pass
            case ast.IfExp(test=test):
                if test is not node:
                    self.follow(parent, trail)
            case ast.BoolOp():
                self.follow(parent, trail)
            case ast.For(target=ast.Name(id=name)):
                trail.bind(name, node)
            case _:
                self._elsewhere(parent, node)

    def _elsewhere(self, parent: ast.AST, node: ast.expr) -> None:
        match parent:
            case ast.Return():
                raise Refused("it is returned")
            case ast.Yield() | ast.YieldFrom() | ast.Await():
                raise Refused("it is yielded or awaited")
            case ast.Tuple() | ast.List() if self._is_joined(parent):
                return
            case ast.Tuple(elts=_) if isinstance(self.parents[parent], ast.Return):
                raise Refused("it is returned")
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.Starred():
                raise Refused("it is put into a container")
            case ast.Subscript() | ast.Slice():
                if not self.gradless(parent):
                    raise Refused("it is used as an index, and autograd keeps indices")
            case _:
                what = type(parent).__name__.lower()
                raise Refused(f"it is used in a way that is not understood ({what})")

    def _is_joined(self, items: ast.AST) -> bool:
        call = self.parents[items]
        return (
            isinstance(call, ast.Call)
            and call.args[:1] == [items]
            and (dotted_text(call.func) or "").rpartition(".")[2] in op.JOINS
        )

    def _bind(self, targets: list[ast.expr], node: ast.AST, trail: Trail) -> None:
        for target in targets:
            match target:
                case ast.Name(id=name):
                    trail.bind(name, node)
                case ast.Subscript(slice=ast.Slice() | ast.Tuple()):
                    pass  # values are copied into a tensor
                case ast.Tuple(elts=parts) if all(isinstance(each, ast.Name) for each in parts):
                    self._bind(parts, node, trail)
                case ast.Attribute():
                    raise Refused(f"it is stored in `{ast.unparse(target)}`")
                case _:
                    raise Refused(f"it is stored in `{ast.unparse(target)}`, which may be a container")

    def _item(self, item: ast.Subscript, trail: Trail) -> None:
        """`t[...]` read is a view; written it takes the values of the right side."""
        if isinstance(item.ctx, ast.Load):
            self.follow(item, trail)
            return
        writer = self.parents[item]
        if isinstance(writer, ast.AugAssign):
            self.written(writer, trail)
        elif isinstance(writer, ast.Assign):
            self._record(writer.value, writer, trail)
        elif not isinstance(writer, ast.Delete):
            trail.records.append("it is written as the target of a statement")

    def written(self, statement: ast.AugAssign, trail: Trail) -> None:
        """`t += x` and `t[i] *= x`: in place."""
        self._record(statement.value, statement, trail)
        forgetful = isinstance(statement.op, ast.Add | ast.Sub | ast.BitAnd | ast.BitOr)
        if not (forgetful or is_number(statement.value) or self.gradless(statement)):
            raise Refused(f"autograd may keep it for `{ast.unparse(statement)}`")
        if not forgetful and not self.gradless(statement):
            trail.objections.append(f"autograd may keep it for `{ast.unparse(statement)}`")

    def _record(self, value: ast.expr, where: ast.AST, trail: Trail) -> None:
        if not (is_number(value) or self.gradless(where)):
            trail.records.append(ast.unparse(value))

    def _operand(self, operator: ast.operator, whole: ast.AST, other: ast.expr, trail: Trail) -> None:
        if isinstance(operator, ast.Add | ast.Sub) or self.gradless(whole):
            return
        said = f"autograd may keep it for `{_short(whole)}`"
        if not is_number(other):
            raise Refused(said)
        scaled = isinstance(operator, ast.Mult) or (
            isinstance(operator, ast.Div) and getattr(whole, "right", None) is other
        )
        if not scaled:
            trail.objections.append(said)

    def _attribute(self, attribute: ast.Attribute, trail: Trail) -> None:
        name = attribute.attr
        if name in op.DESCRIPTIONS:
            return
        if name in op.SHARING_ATTRIBUTES:
            self.follow(attribute, trail)
            return
        call = self.parents[attribute]
        if not isinstance(call, ast.Call) or call.func is not attribute:
            raise Refused(f"its `.{name}` is taken, which is not understood")
        self._method(call, name, trail)

    def _method(self, call: ast.Call, name: str, trail: Trail) -> None:
        """`t.name(...)`."""
        if name in op.VIEWS or name in op.PARTS:
            self.follow(call, trail)
        elif name in op.FILLS or name in op.WRITES or name in op.KEEPS_ITS_RESULT:
            self._in_place(call, name, trail)
        elif name in op.ASKS or name in op.FORGETS:
            pass
        elif name in op.MAKES_NEW:
            self._may_keep(call, [*call.args, *(word.value for word in call.keywords)], trail)
        else:
            raise Refused(f"its method `{name}` is not known to let go of it")

    def _in_place(self, call: ast.Call, name: str, trail: Trail) -> None:
        given = [*call.args, *(word.value for word in call.keywords)]
        if name == "masked_fill_":
            given = given[1:]  # the mask is no value
        if not self.gradless(call):
            trail.records += [ast.unparse(each) for each in given if not is_number(each)]
            if name in op.KEEPS_ITS_RESULT or name in op.RECORDS_ITSELF:
                trail.objections.append(f"autograd may keep it for `{_short(call)}`")
        self.follow(call, trail)

    def _may_keep(self, call: ast.Call, others: list[ast.expr], trail: Trail) -> None:
        """A new tensor comes out; whether autograd keeps the old one depends on whether it records."""
        if self.gradless(call) or any(word.arg == "out" for word in call.keywords):
            return  # torch refuses `out=` wherever it would have to record
        said = f"autograd may keep it for `{_short(call)}`"
        if not all(is_number(each) or _is_option(each) for each in others):
            raise Refused(said)
        trail.objections.append(said)

    def _keyword(self, word: ast.keyword, trail: Trail) -> None:
        call = self.parents[word]
        assert isinstance(call, ast.Call)
        callee = self.callee(call)
        if word.arg == "out" and callee.startswith("torch."):
            self.follow(call, trail)  # `torch.op(..., out=t)` gives t
            return
        self._argument(call, word.value, trail)

    def _argument(self, call: ast.Call, node: ast.expr, trail: Trail) -> None:
        """`f(t)`, and `x.f(t)` for another tensor x."""
        callee = self.callee(call)
        name = callee.rpartition(".")[2]
        first = call.args[:1] == [node]
        if callee in op.HARMLESS_BUILTINS:
            return
        of_torch = callee.startswith("torch.")
        if of_torch and first and (name in op.VIEWS or name in op.PARTS or name == "dropout"):
            self.follow(call, trail)
        elif callee.startswith("torch.distributed."):
            self._collective(call, name)
        elif self._is_forgotten(call, node, of_torch=of_torch):
            return
        elif of_torch and name in op.MAKES_NEW:
            others = [each for each in call.args if each is not node]
            self._may_keep(call, [*others, *(word.value for word in call.keywords)], trail)
        elif name in op.MAKES_NEW | op.WRITES and self.gradless(call) and _is_tensor_call(call):
            return
        else:
            raise Refused(f"it is passed to `{ast.unparse(call.func)}`, which may keep it")

    def _is_forgotten(self, call: ast.Call, node: ast.expr, *, of_torch: bool) -> bool:
        name = self.callee(call).rpartition(".")[2]
        if name in op.ALL_FORGOTTEN:
            return of_torch or self._is_method_of_a_tensor(call, name)
        return of_torch and call.args[:1] == [node] and (name in op.FORGETS or name in op.ASKS)

    def _is_method_of_a_tensor(self, call: ast.Call, name: str) -> bool:
        """`x.add(t)`; as a statement of its own that would be a set's `add`, which keeps t."""
        return _is_tensor_call(call) and (name.endswith("_") or not isinstance(self.parents[call], ast.Expr))

    def _collective(self, call: ast.Call, name: str) -> None:
        waits = not any(word.arg == "async_op" and not _is_false(word.value) for word in call.keywords)
        if not waits or name not in op.FORGETS:
            raise Refused(f"it is passed to `{ast.unparse(call.func)}`, which may still use it later")

    def callee(self, call: ast.Call) -> str:
        """The callee's dotted name, by the file's imports."""
        text = dotted_text(call.func) or ""
        head, dot, rest = text.partition(".")
        return self.origins.get(head, head) + dot + rest

    def gradless(self, node: ast.AST) -> bool:
        """Whether autograd records nothing there, by what stands in the text around it."""
        while node is not self.method:
            node = self.parents[node]
            if isinstance(node, ast.With):
                for item in reversed(node.items):
                    name = _mode(item.context_expr)
                    if name in _GRADLESS:
                        return True
                    if name in _GRADFUL:
                        return False
        return any(_mode(each) in _GRADLESS for each in self.method.decorator_list)


_GRADLESS = frozenset(("no_grad", "inference_mode"))
_GRADFUL = frozenset(("enable_grad", "set_grad_enabled", "set_grad_enabled?", "inference_mode?"))


def _mode(node: ast.expr) -> str:
    """The last name of a context manager or decorator, with a question mark where it has arguments."""
    called = node.func if isinstance(node, ast.Call) else node
    asks = "?" if isinstance(node, ast.Call) and (node.args or node.keywords) else ""
    return (dotted_text(called) or "").rpartition(".")[2] + asks


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _is_option(node: ast.expr) -> bool:
    """A dtype, a flag: no tensor."""
    if isinstance(node, ast.Constant):
        return True
    return (dotted_text(node) or "").startswith("torch.")


def _is_tensor_call(call: ast.Call) -> bool:
    """`x.matmul(t)`: a method of something that is no `self`."""
    return isinstance(call.func, ast.Attribute) and not (dotted_text(call.func) or "self").startswith("self")


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}..."
