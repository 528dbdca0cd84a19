"""What annotations say: the type they name, and those of elements, values and parts of what they describe."""

import ast

from auditor.project.code.modules import Class, Function, Module, last_part
from auditor.project.code.project import Project, dotted_name

Type = Class | str
"""A class of the project, or the dotted name of something outside it."""

Written = tuple[Module, ast.expr]
"""An annotation as it stands in a module, for what `Type` cannot say: `dict[str, list[Block]]`."""

SEQUENCES = frozenset({"list", "List", "Sequence", "MutableSequence", "Iterable", "Collection", "set", "Set",
                       "frozenset", "deque", "Deque", "Iterator", "Generator", "AsyncIterator",
                       "AsyncGenerator", "AsyncIterable", "ModuleList"})  # fmt: skip
MAPPINGS = frozenset({"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict",
                      "WeakValueDictionary"})  # fmt: skip
TUPLES = frozenset({"tuple", "Tuple"})
OPTIONAL = frozenset({"Optional", "Final", "ClassVar", "Annotated"})
VIEWS = frozenset({"items", "values", "keys", "get", "pop", "popleft", "setdefault"})
SAYING_NOTHING = frozenset({"typing.Any", "typing_extensions.Any"})
"""A field that is declared so is what it is given: `self.limiter: Any = None`, and later a `Limiter()`."""

RESULT_WRAPPERS = frozenset(
    {"Awaitable", "Coroutine", "AbstractContextManager", "AbstractAsyncContextManager"}
)


def named(project: Project, module: Module, node: ast.expr) -> Class | Function | Module | str | None:
    """What a name or dotted name means at module level; the dotted text where it lies outside the
    project."""
    parts = dotted_name(node)
    if parts is None:
        return None
    found = project.member(module, parts)
    if found is not None:
        return found
    target = module.imports.get(parts[0])
    return ".".join([target, *parts[1:]]) if target is not None else None


def type_named(project: Project, written: Written | None) -> Type | None:
    """The class that an annotation names; None for containers of it and for what is no class."""
    written = _bare(written)
    if written is None:
        return None
    module, node = written
    if isinstance(node, ast.BinOp):
        return type_named(project, (module, node.left)) or type_named(project, (module, node.right))
    if isinstance(node, ast.Subscript):
        name, inner = _subscript(node)
        if name == "Union":
            options = (type_named(project, (module, option)) for option in inner)
            return next((option for option in options if option is not None), None)
        if name in SEQUENCES | MAPPINGS | TUPLES:
            return None
        return type_named(project, (module, node.value))
    found = named(project, module, node)
    return found if isinstance(found, (Class, str)) and found not in SAYING_NOTHING else None


def is_container(written: Written | None) -> bool:
    """`deque[Block | None]`, `dict[str, Block]`: of the library, whatever it holds."""
    written = _bare(written)
    if written is None:
        return False
    node = written[1]
    name = last_part(node.value if isinstance(node, ast.Subscript) else node)
    return name in SEQUENCES | MAPPINGS | TUPLES


def element(written: Written | None) -> Written | None:
    """What iterating over it gives."""
    return _inner(written, 0)


def item(written: Written | None) -> Written | None:
    """What `x[key]` gives."""
    return _inner(written, -1)


def part(written: Written | None, index: int) -> Written | None:
    """One of the values that a tuple is unpacked into."""
    written = _bare(written)
    if written is None or not isinstance(written[1], ast.Subscript):
        return None
    name, inner = _subscript(written[1])
    if name not in TUPLES:
        return _inner(written, -1)
    uniform = len(inner) == 2 and isinstance(inner[1], ast.Constant) and inner[1].value is ...
    if uniform or index >= len(inner):
        return (written[0], inner[0]) if uniform else None
    return written[0], inner[index]


def view(written: Written | None, method: str) -> Written | None:
    """What `x.items()` and its kin give, as an annotation of its own."""
    written = _bare(written)
    if written is None or not isinstance(written[1], ast.Subscript):
        return None
    name, inner = _subscript(written[1])
    if name not in MAPPINGS or len(inner) != 2:
        return (written[0], inner[0]) if method in ("pop", "popleft") and name in SEQUENCES else None
    sides = {
        "items": ast.Subscript(ast.Name("tuple"), ast.Tuple(inner)),
        "values": inner[1],
        "keys": inner[0],
    }
    if method in sides:
        return written[0], ast.Subscript(ast.Name("list"), sides[method])
    return (written[0], inner[1]) if method in ("get", "pop", "setdefault") else None


def _inner(written: Written | None, index: int) -> Written | None:
    written = _bare(written)
    if written is None or not isinstance(written[1], ast.Subscript):
        return None
    name, inner = _subscript(written[1])
    if name in MAPPINGS:
        return written[0], inner[index]
    return (written[0], inner[0]) if name in SEQUENCES | TUPLES else None


def _bare(written: Written | None) -> Written | None:
    """Without quotes, `Optional`, `| None` and what an `await` or a `with` takes off."""
    while written is not None:
        module, node = written
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                written = module, ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError):
                return None
        elif isinstance(node, ast.BinOp) and _is_none(node.right):
            written = module, node.left
        elif isinstance(node, ast.BinOp) and _is_none(node.left):
            written = module, node.right
        elif isinstance(node, ast.Subscript) and _subscript(node)[0] in OPTIONAL | RESULT_WRAPPERS | {
            "Type",
            "type",
        }:
            name, inner = _subscript(node)
            written = module, inner[-1 if name == "Coroutine" else 0]
        else:
            return written
    return None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _subscript(node: ast.Subscript) -> tuple[str, list[ast.expr]]:
    parts = dotted_name(node.value)
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return parts[-1] if parts else "", inner
