"""Standard names: a method (PA401) or a switch (PA403) renamed wherever it is defined and used, or nowhere.

A name that also stands in a string may be asked for by it (`getattr`, a config), and a name that other
classes use for something else cannot be told apart at every use: then nothing is offered.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.adopt.draft import Draft, Place, Refused
from auditor.adopt.repairs.offer import draft_of, files_with, offered
from auditor.case import Case, Parsed
from auditor.model import FixOffer
from auditor.project.adoption.class_table import ClassTable
from auditor.source.entries import ClassIndex
from auditor.source.imports import dotted_text

Key = tuple[str, str]


def renamed_method(case: Case, old: str, new: str) -> FixOffer | None:
    """The method of a class, of its bases and heirs, and every use of it in the project."""
    try:
        names = _Family(case)
        pairs = [(file, _renamed(file, _Methods(names, old, new))) for file in files_with(case, old)]
    except Refused:
        return None
    if not names.defined:
        return None  # it comes from outside of the project
    return offered(pairs, f"`{old}` renamed to `{new}` wherever it is defined and used")


def renamed_switch(case: Case, old: str, new: str) -> FixOffer | None:
    """The parameter of `__init__`, its uses inside, and the keyword of everyone who builds the class."""
    try:
        names = _Family(case)
        pairs = [(file, _renamed(file, _Switches(names, old, new))) for file in files_with(case, old)]
    except Refused:
        return None
    return offered(pairs, f"`{old}` renamed to `{new}`, with its callers' keywords")


class _Family:
    """The class that a finding is about, with its bases and heirs in the project."""

    def __init__(self, case: Case) -> None:
        table = ClassTable(sorted(case.facts.files, key=lambda each: each.path))
        path = case.finding.span.path
        symbol = case.finding.symbol.rpartition(".")[0]
        own = next(
            (each for each in table.classes() if (each.span.path, each.qualname) == (path, symbol)), None
        )
        if own is None:
            raise Refused("its class is not known")
        self.own = _key(own)
        above = {_key(each) for each in table.ancestors(own)}
        self.heirs = {
            _key(each)
            for each in table.classes()
            if any(_key(base) == self.own for base in table.ancestors(each))
        }
        self.keys = above | self.heirs | {self.own}
        self.names = {key[1].rpartition(".")[2] for key in self.keys}
        self.built_by = {key[1].rpartition(".")[2] for key in self.heirs | {self.own}}
        self.defined = False


def _key(entry: ClassIndex) -> Key:
    return entry.span.path, entry.qualname


@dataclass(frozen=True, slots=True)
class _Methods:
    """A method that gets another name: where a node of the tree says the old one."""

    family: _Family
    old: str
    new: str

    def said_by(self, draft: Draft, node: ast.AST) -> Iterator[Place]:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name in (self.old, self.new):
                owner = _class_around(draft, node)
                related = owner is not None and (draft.path, owner) in self.family.keys
                if name == self.new and related:
                    raise Refused("the standard name is taken")
                if name == self.old and not related:
                    raise Refused("something else has that name too")
                if name == self.old:
                    self.family.defined = True
                    yield _after_def(draft, node, name)
            case ast.Attribute(attr=name) if name == self.old:
                line, column = draft.end(node)
                yield line, column - len(name)
            case ast.Name(id=name) | ast.alias(name=name) if name == self.old:
                raise Refused("it is used as a plain name")


@dataclass(frozen=True, slots=True)
class _Switches:
    """A switch that gets another name: where a node of the tree says the old one."""

    family: _Family
    old: str
    new: str

    def said_by(self, draft: Draft, node: ast.AST) -> Iterator[Place]:
        match node:
            case ast.FunctionDef(name="__init__"):
                if (draft.path, _class_around(draft, node)) == self.family.own:
                    yield from _in_constructor(draft, node, self.old, self.new)
            case ast.Call():
                yield from _keywords(draft, node, self.family, self.old)


def _renamed(file: Parsed, name: _Methods | _Switches) -> Draft:
    """One file with the new name. Raises Refused where a use cannot be told apart."""
    draft = draft_of(file)
    places: list[Place] = []
    for node in ast.walk(draft.tree):
        if isinstance(node, ast.Constant) and node.value == name.old:
            raise Refused("it may be asked for by its name")
        places += name.said_by(draft, node)
    return _replaced(draft, list(dict.fromkeys(places)), name.old, name.new)


def _in_constructor(draft: Draft, init: ast.FunctionDef, old: str, new: str) -> Iterator[Place]:
    args = init.args
    names = {each.id for each in ast.walk(init) if isinstance(each, ast.Name)}
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    if new in names | {each.arg for each in every if each is not None}:
        raise Refused("the standard name is taken")
    yield from (draft.start(each) for each in every if each is not None and each.arg == old)
    yield from (draft.start(each) for each in ast.walk(init) if isinstance(each, ast.Name) and each.id == old)


def _keywords(draft: Draft, call: ast.Call, family: _Family, old: str) -> Iterator[Place]:
    """The keyword of a call that builds the class; another class's keyword of that name is its own."""
    for word in call.keywords:
        if word.arg != old:
            continue
        callee = call.func.attr if isinstance(call.func, ast.Attribute) else dotted_text(call.func) or ""
        from_heir = callee == "__init__" and (draft.path, _class_around(draft, call)) in family.heirs
        if from_heir or callee in family.built_by:
            yield draft.start(word)
        elif not callee[:1].isupper():
            raise Refused("it may be handed to the class by another name")


def _class_around(draft: Draft, node: ast.AST) -> str | None:
    """The qualified name of the class that holds a node."""
    names: list[str] = []
    while node in draft.parents:
        node = draft.parents[node]
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and names:
            names.append(f"{node.name}.<locals>")
    return ".".join(reversed(names)) or None


def _after_def(draft: Draft, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Place:
    line, column = draft.start(node)
    return line, draft.lines[line - 1].index(name, column + len("def "))


def _replaced(draft: Draft, places: list[Place], old: str, new: str) -> Draft:
    changes = [((line, column), (line, column + len(old)), new) for line, column in places]
    for (line, column), _, _ in changes:
        if not draft.lines[line - 1].startswith(old, column):
            raise Refused("its place in the text is not where the tree says")
    return draft.replaced(*changes)
