"""Methods that work with what their class has, seen as methods of an object that has it:

class Sessions:                             class Sessions:
    _live = {}                                  _live = {}

    @classmethod
    def end(cls, key):                          def end(cls, key):
        cls._live.pop(key)                          cls._live.pop(key)

    @staticmethod
    def count():                                def count(self):
        return len(Sessions._live)                  return len(self._live)
"""

import ast
from collections.abc import Set
from dataclasses import replace

from auditor.project.code.bindings import assigned_by
from auditor.project.code.modules import Class, Function
from auditor.project.code.shared_state import OBJECT, Shared, parsed

OF_CLASS = frozenset({"classmethod", "staticmethod"})


def methods_of_class(cls: Class) -> Shared | None:
    """Nothing where its methods only work with what each object has of its own."""
    kept = {
        target.id
        for statement in cls.node.body
        for target, _ in assigned_by(statement)
        if isinstance(target, ast.Name)
    }
    by_name = any(f"{cls.name}.{name}" in cls.text for name in kept)
    of_class = any(not OF_CLASS.isdisjoint(method.decorators) for method in cls.methods.values())
    if not kept or not (by_name or of_class):
        return None
    seen_as = replace(cls, methods={})
    seen: dict[Function, Function] = {}
    for name, method in cls.methods.items():
        node = parsed(cls.module, method.node) if isinstance(method.node, ast.stmt) else []
        if node and isinstance(node[0], ast.FunctionDef | ast.AsyncFunctionDef):
            written = _OfObject(cls.name, kept | cls.methods.keys()).method(node[0])
            seen[method] = seen_as.methods[name] = Function(cls.module, method.qualname, written, seen_as)
            seen[method]._text = ast.unparse(written)
    return Shared(seen_as, seen)


class _OfObject(ast.NodeTransformer):
    """`Sessions._live`, `type(self)._live` and `self.__class__._live` become `self._live`."""

    def __init__(self, cls: str, names: Set[str]) -> None:
        self.cls = cls
        self.names = names
        self.own = OBJECT

    def method(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef | ast.AsyncFunctionDef:
        static = any(getattr(each, "id", "") == "staticmethod" for each in node.decorator_list)
        node.decorator_list = [
            each for each in node.decorator_list if getattr(each, "id", "") not in OF_CLASS
        ]
        if static or not node.args.args:
            node.args.args.insert(0, ast.arg(OBJECT))
        self.own = node.args.args[0].arg
        node.body = [self.visit(statement) for statement in node.body]
        return ast.fix_missing_locations(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr in self.names and self._is_class(node.value):
            node.value = ast.copy_location(ast.Name(self.own, ast.Load()), node.value)
            return node
        return self.generic_visit(node)

    def _is_class(self, value: ast.expr) -> bool:
        match value:
            case ast.Name(id=name):
                return name == self.cls
            case ast.Call(func=ast.Name(id="type"), args=[ast.Name(id=name)]):
                return name == self.own
            case ast.Attribute(value=ast.Name(id=name), attr="__class__"):
                return name == self.own
        return False
