"""Where gradients are recorded, and for which parameters and attributes they may be wanted."""

import ast
import re
from collections.abc import Callable, Iterator

from auditor.ir.ops import Path
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.source.nodes import walk

SWITCHED_OFF = frozenset(
    {"no_grad", "inference_mode", "custom_op", "impl", "register_fake", "triton_op", "setup_context"}
)
NUMBERS = re.compile(
    r"(?:.*_)?(?:scale|scaling|alpha|beta|eps|epsilon|temperature|factor|dim|size|count|num|len|length|index|idx|step"
    r"|rate|ratio|prob|lr|momentum|decay|start|end|offset|axis|device|dtype|shape|seed|pool|kernel|stream|group|event)s?"
)
"""Parameters that are numbers or things by their names."""

PLAIN = frozenset({"int", "float", "bool", "str", "dtype", "device", "Size", "Generator", "Stream"})


def records(model: ClassModel, function: Function) -> bool:
    """Whether what the function computes can be differentiated, as far as the function itself says."""
    scope: Function | None = function
    while scope is not None:
        if SWITCHED_OFF & set(scope.decorators):
            return False
        if scope.cls is not None and is_autograd_function(model, scope):
            return False
        scope = scope.parent
    return True


def is_autograd_function(model: ClassModel, function: Function) -> bool:
    """Its forward and backward run with recording off."""
    assert function.cls is not None
    if function.name not in ("forward", "backward", "setup_context", "vjp", "jvp"):
        return False
    bases = [ast.unparse(base) for each in model.lineage(function.cls) for base in each.node.bases]
    return any(base.rpartition(".")[2] == "Function" for base in bases)


class Wanted:
    """For which parameters and attributes a gradient may be wanted; each class is read once."""

    def __init__(self, model: ClassModel) -> None:
        self.model = model
        self._trained: dict[Class, frozenset[str]] = {}

    def trained(self, function: Function) -> frozenset[str]:
        """Attributes of the function's object that are parameters of the module."""
        scope = function
        while scope.cls is None and scope.parent is not None:
            scope = scope.parent
        if scope.cls is None:
            return frozenset()
        if scope.cls not in self._trained:
            self._trained[scope.cls] = frozenset(_trained(self.model, scope.cls))
        return self._trained[scope.cls]

    def of(self, function: Function) -> Callable[[Path], bool]:
        """Whether a gradient may be wanted for a parameter of the function or an attribute of its object."""
        return _wanted(function, self.trained(function))


def _wanted(function: Function, trained: frozenset[str]) -> Callable[[Path], bool]:
    numbers = _plain_parameters(function)
    own = (
        function.parameters[0]
        if function.is_method and not function.is_static and function.parameters
        else None
    )
    parameters = frozenset(function.graph.parameters)

    def needs(path: Path) -> bool:
        root = path[0]
        if root == own:
            return len(path) > 1 and path[1].lstrip(".") in trained
        return root in parameters and root not in numbers and root != "ctx"

    return needs


def _plain_parameters(function: Function) -> frozenset[str]:
    """Those that their annotation, default or name says to be no tensor."""
    if isinstance(function.node, ast.Module):
        return frozenset()
    args = function.node.args
    given = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    positional = [*args.posonlyargs, *args.args]
    defaults = dict(zip([a.arg for a in reversed(positional)], reversed(args.defaults), strict=False))
    found = set()
    for arg in given:
        default = defaults.get(arg.arg)
        if arg.annotation is not None:
            if PLAIN & set(re.findall(r"\w+", ast.unparse(arg.annotation))):
                found.add(arg.arg)
        elif NUMBERS.fullmatch(arg.arg.lower()) or (
            isinstance(default, ast.Constant) and default.value is not None
        ):
            found.add(arg.arg)
    return frozenset(found)


def _trained(model: ClassModel, owner: Class) -> Iterator[str]:
    for cls in model.lineage(owner):
        for node in walk(cls.node):
            match node:
                case ast.Assign(targets=[ast.Attribute(attr=attr)], value=ast.Call() as call):
                    if ast.unparse(call.func).endswith("Parameter"):
                        yield attr
                case ast.AnnAssign(target=ast.Attribute(attr=attr), value=ast.Call() as call):
                    if ast.unparse(call.func).endswith("Parameter"):
                        yield attr
                case ast.Call(
                    func=ast.Attribute(attr="register_parameter"), args=[ast.Constant(value=str(name)), *_]
                ):
                    yield name
