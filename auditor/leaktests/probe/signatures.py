"""What a callable of the target wants: its parameters, those that it hands on to its bases included."""

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

_TAKEN = re.compile(
    r"""kwargs\.(?:pop|get)\(\s*['"](\w+)['"]\s*(,\s*([^()]*?)\s*)?\)|kwargs\[['"](\w+)['"]\]"""
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """`annotation` is text; `default` is None too where there is none, which `required` tells apart."""

    name: str
    annotation: str
    required: bool
    default: Any = None
    positional: bool = False
    type: Any = None


def constructor(kind: type) -> list[Parameter]:
    """The parameters of a class, and through `**kwargs` those of its bases."""
    found: dict[str, Parameter] = {}
    for base in kind.__mro__:
        own = vars(base).get("__init__")
        if own is None or base.__module__.startswith("torch.nn.modules.module") or base is object:
            continue
        parameters = _of(own, skip_first=True)
        for parameter in parameters:
            found.setdefault(parameter.name, parameter)
        if not _takes_any(own):
            break
        for parameter in _taken_from_kwargs(own):
            found.setdefault(parameter.name, parameter)
        if not _hands_on(own):
            break
    given = _given_to_bases(kind)
    return [entry for entry in found.values() if entry.name not in given]


def call(function: Callable[..., Any], *, skip_first: bool, all_positional: bool = False) -> list[Parameter]:
    """The parameters of forward, of a function, of an autograd function's forward after its context."""
    parameters = _of(function, skip_first=skip_first, variable=True)
    if all_positional:
        return [Parameter(p.name, p.annotation, p.required, p.default, True, p.type) for p in parameters]
    return parameters


def _of(function: Callable[..., Any], *, skip_first: bool, variable: bool = False) -> list[Parameter]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    entries = list(signature.parameters.values())[1 if skip_first else 0 :]
    named_inputs = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in entries)
    found = []
    for entry in entries:
        if entry.kind is entry.VAR_KEYWORD:
            continue
        if entry.kind is entry.VAR_POSITIONAL:
            if variable and not named_inputs:
                found.append(Parameter(entry.name, _text(entry.annotation), True, positional=True))
            continue
        required = entry.default is entry.empty
        default = None if required else entry.default
        positional = entry.kind is entry.POSITIONAL_ONLY
        kind = None if entry.annotation is entry.empty else entry.annotation
        found.append(Parameter(entry.name, _text(entry.annotation), required, default, positional, kind))
    return found


def _text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    if isinstance(annotation, str):
        return annotation
    return inspect.formatannotation(annotation).replace("torch.Tensor", "Tensor")


def _takes_any(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(entry.kind is entry.VAR_KEYWORD for entry in parameters)


def _hands_on(function: Callable[..., Any]) -> bool:
    return bool(re.search(r"super\(.*\n?.*\*\*kwargs|__init__\((?:.|\n)*\*\*kwargs", _source(function)))


def _taken_from_kwargs(function: Callable[..., Any]) -> Iterator[Parameter]:
    """`kwargs.pop("heads", 8)` is a parameter too; only literal defaults are read."""
    for match in _TAKEN.finditer(_source(function)):
        name, default = match[1] or match[4], match[3]
        if match[2] is None and (match[4] or ".pop" in match[0]):
            yield Parameter(name, "", True)
            continue
        try:
            value = ast.literal_eval(default) if default else None
        except (ValueError, SyntaxError):
            value = None
        yield Parameter(name, "", False, value)


def _given_to_bases(kind: type) -> set[str]:
    """Names that a class itself hands to its base: `super().__init__(causal=True, **kwargs)`."""
    own = vars(kind).get("__init__")
    if own is None or not _takes_any(own):
        return set()
    try:
        tree = ast.parse(textwrap.dedent(_source(own)))
    except SyntaxError:
        return set()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    handed = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "__init__"]
    names = {keyword.arg for c in handed for keyword in c.keywords if keyword.arg}
    return names - {parameter.name for parameter in _of(own, skip_first=True)}


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError, IndentationError):
        return ""


def is_plain_class(value: object) -> bool:
    """A class of the target's own that is built from values: dataclasses and the like."""
    return (
        isinstance(value, type)
        and not issubclass(value, enum.Enum)
        and (
            is_dataclass(value) or value.__module__ not in ("builtins", "typing", "torch", "collections.abc")
        )
    )
