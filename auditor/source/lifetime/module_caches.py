"""Caches of the standard library that keep modules or tensors alive (PA504)."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from auditor.source.entries import module_name
from auditor.source.lifetime.code import Code, Function, text_of
from auditor.source.lifetime.sighting import Kind, Sighting

_MODULE_BASE = re.compile(
    r"(?:^|\.)(?:Module|ModuleList|LightningModule|PreTrainedModel|\w*Model|\w*Module)$"
)
_NO_MODULE = re.compile(r"(?:^|\.)(?:BaseModel|RootModel|\w*DataModule|\w*Config\w*)$")
_HELD_TYPE = re.compile(r"^(?:torch\.)?(?:nn\.Module|Tensor|nn\.Parameter|PreTrainedModel|GraphModule)$")
ON_METHOD, BY_ARGUMENT = "on a method", "by argument"
_CACHES = frozenset(("functools.lru_cache", "functools.cache"))


def objects_cached(code: Code) -> Iterator[Sighting]:
    for function in code.functions:
        for decorator in function.decorator_list:
            name = _resolved(code, decorator.func if isinstance(decorator, ast.Call) else decorator)
            if name in _CACHES:
                yield from _cached_by(code, function, decorator)
            elif "cache" in name.rpartition(".")[2]:
                yield from (replace(each, needs=name) for each in _cached_by(code, function, decorator))
    yield from _wrappers(code)


def _cached_by(code: Code, function: Function, decorator: ast.expr) -> Iterator[Sighting]:
    owner = code.method_class(function)
    arguments = [*function.args.posonlyargs, *function.args.args]
    if owner is not None and arguments and arguments[0].arg == "self":
        if _is_module(code, owner):
            yield code.sighting(Kind.OBJECT_CACHED, decorator, owner.name, function.name, ON_METHOD)
    elif held := next((each.arg for each in arguments if _is_held(each)), None):
        yield code.sighting(Kind.OBJECT_CACHED, decorator, held, function.name, BY_ARGUMENT)


def _wrappers(code: Code) -> Iterator[Sighting]:
    """Decorators of the file that hand what they decorate to `lru_cache`: `lru_cache(...)(func)`.

    One that does so when the method is called, with self at hand, makes a cache for each instance.
    """
    for call in code.calls.get("", ()):
        function = code.function_of(call)
        if function is None or not isinstance(call.func, ast.Call) or len(call.args) != 1:
            continue
        taken = [each.arg for each in function.args.args]
        if (
            _resolved(code, call.func.func) in _CACHES
            and text_of(call.args[0]) in taken
            and "self" not in taken
        ):
            name = code.symbol(call).partition(".")[0]
            dotted = f"{module_name(code.source.path)}.{name}"
            yield code.sighting(Kind.CACHE_WRAPPED, call, dotted)


def _resolved(code: Code, callee: ast.expr) -> str:
    """A dotted name as the file's imports resolve it; a function of the file itself under its module."""
    head, dot, rest = text_of(callee).partition(".")
    own = (
        f"{module_name(code.source.path)}.{head}" if head in {each.name for each in code.functions} else head
    )
    return code.origins.get(head, own) + dot + rest


def is_cache(code: Code, decorator: ast.expr) -> bool:
    return _resolved(code, decorator.func if isinstance(decorator, ast.Call) else decorator) in _CACHES


def _is_module(code: Code, owner: ast.ClassDef) -> bool:
    for base in owner.bases:
        text = text_of(base)
        if _MODULE_BASE.search(text) and not _NO_MODULE.search(text):
            head = text.partition(".")[0]
            return "pydantic" not in code.origins.get(head, "") and _uses_tensors(owner)
    return False


def _uses_tensors(owner: ast.ClassDef) -> bool:
    """A `forward`, or parameters: `Model` in a base's name alone says nothing."""
    methods = {node.name for node in owner.body if isinstance(node, Function)}
    text = {node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute)}
    return "forward" in methods or bool(
        text & {"parameters", "register_buffer", "state_dict", "named_parameters"}
    )


def _is_held(argument: ast.arg) -> bool:
    """A parameter that is a network or a tensor by its annotation; where it may be None, it mostly is."""
    return argument.annotation is not None and bool(
        _HELD_TYPE.match(ast.unparse(argument.annotation).strip("'\""))
    )
