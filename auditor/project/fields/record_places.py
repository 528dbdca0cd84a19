"""Where on a record a lease lies, and which methods of a class have such records in their hands: those of one
of its tables, `self.running[*].port`, or those that they are told, `job.port`."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from auditor.flow.lease import Field
from auditor.ir.calls import PUTTING
from auditor.ir.ops import ANY_ITEM, RESULT, Path
from auditor.project.code.bindings import assignments, given_to, gone_through, own_attribute
from auditor.project.code.modules import Function, last_part
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

TAKING = frozenset({"pop", "popleft", "popitem", "remove", "discard", "heappop", "get_nowait"})

TABLES = frozenset({"list", "List", "dict", "Dict", "set", "Set", "deque", "Deque", "OrderedDict",
                    "defaultdict", "DefaultDict", "Queue"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """`field` and what lies below it, of records in these tables of the method's own object, or `told` under
    this name with this annotation. `sure` where the filling function has the record from the table or puts it
    there; else another one puts such records there. Where there are several of those, a record is
    `perhaps` in one of them."""

    field: Path
    tables: frozenset[str]
    told: str
    annotation: str
    sure: bool
    perhaps: frozenset[str] = frozenset()

    def is_of_the_same(self, other: "RecordPlace") -> bool:
        """Another field of the same kind of record."""
        if self.field[0] == other.field[0]:
            return False
        if self.annotation and other.annotation:
            return self.annotation == other.annotation
        return bool(self.tables & other.tables) or (self.told == other.told and bool(self.told))

    def as_field(self, owner: str) -> Field:
        """`job.port` of a job by that name, `self.running[*].port` of one that has none."""
        root = self.told or f"self.{min(self.tables)}{ANY_ITEM}"
        return Field(owner, "".join(self.field)[1:], root)

    def in_tables(self, method: Function) -> tuple[Path, ...]:
        own = method.owner or ""
        return tuple((own, f".{table}", ANY_ITEM, *self.field) for table in sorted(self.tables))

    def in_one_of(self, method: Function) -> Iterator[tuple[Path, ...]]:
        """For each table that such a record is in perhaps."""
        own = method.owner or ""
        yield from (((own, f".{table}", ANY_ITEM, *self.field),) for table in sorted(self.perhaps))

    def where_told(self, method: Function) -> Iterator[tuple[Path, ...]]:
        for name in method.parameters[1:]:
            said = annotation_of(method, name)
            if said == self.annotation if said and self.annotation else name == self.told:
                yield ((name, *self.field),)


def record_place(
    function: Function, places: Iterable[Path], family: Sequence[Function]
) -> RecordPlace | None:
    """None where the lease lies in no record, or in two fields of it, or its caller has it as well."""
    held = set(places)
    found = {each for each in (_split(function, path) for path in held) if each is not None}
    fields = {field for _, field in found}
    if len(found) != len(held) or len(fields) != 1 or RESULT in {path[:1] for path in held}:
        return None
    names = {name for name, _ in found if not name.startswith(".")}
    tables = {name[1:] for name, _ in found if name.startswith(".")}
    if len(names) > 1:
        return None
    name = next(iter(names), "")
    annotation = annotation_of(function, name) or _made_as(function, name)
    tables |= {*put_into(function, name)} | {*_looked_up_in(function, name)} if name else set()
    tables -= {*taken_out_of(function)} if name else set()
    sure, perhaps = bool(tables), set[str]()
    if not tables and name in function.parameters:
        perhaps = {*_tables_of(family, name, annotation)}
        tables = perhaps if len(perhaps) == 1 else set()
    return RecordPlace(
        next(iter(fields)), frozenset(tables), name, annotation, sure, frozenset(perhaps - tables)
    )


def without_shown_records(function: Function, places: set[Path]) -> set[Path]:
    """`self.jobs[key] = job`, `return job`: the table keeps the record that the caller is shown."""
    kept = kept_in_tables(function, places)
    return {path for path in places if path[:1] != RESULT or len(path) < 2 or path[1:] not in kept}


def kept_in_tables(function: Function, places: set[Path]) -> set[Path]:
    """Where on the records of its own object's tables."""
    return {path[3:] for path in places if path[0] == function.owner and path[2:3] == (ANY_ITEM,)}


def _split(function: Function, path: Path) -> tuple[str, Path] | None:
    """The table or the name of the record, and where in it."""
    own = function.owner
    if path[0] == own:
        if len(path) > 3 and path[2] == ANY_ITEM and path[3].startswith("."):
            return path[1], path[3:]
        return None
    if path[0].isidentifier() and len(path) > 1 and path[1].startswith("."):
        return path[0], path[1:]
    return None


def annotation_of(function: Function, name: str) -> str:
    if isinstance(function.node, ast.Module | ast.Lambda):
        return ""
    args = function.node.args
    for each in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        if each.arg == name:
            match each.annotation:
                case ast.Name(id=said) | ast.Attribute(attr=said):
                    return said
                case ast.Constant(value=str(said)):
                    return said
    return ""


def _made_as(function: Function, name: str) -> str:
    """`Job` of `job = Job(name)`."""
    made = [value for value in given_to(function, name) if isinstance(value, ast.Call)]
    if len(made) == 1 and isinstance(made[0].func, ast.Name) and made[0].func.id[:1].isupper():
        return made[0].func.id
    return ""


def put_into(function: Function, name: str) -> Iterator[str]:
    """Tables of the own object that the record is put into: `self.running[job.name] = job`."""
    own = function.owner or ""
    for target, value in assignments(function):
        if getattr(value, "id", None) != name or not isinstance(target, ast.Subscript):
            continue
        if (table := own_attribute(target.value, own)) is not None:
            yield table
    for call in function.calls:
        if last_name(call) in PUTTING and isinstance(call.func, ast.Attribute):
            table = own_attribute(call.func.value, own)
            if table is not None and any(getattr(each, "id", None) == name for each in call.args):
                yield table


def _looked_up_in(function: Function, name: str) -> Iterator[str]:
    """`job = self.jobs[key]`, `self.jobs.get(key)`, or a loop over them."""
    own = function.owner or ""
    for value in given_to(function, name):
        match value:
            case ast.Subscript(value=table) | ast.Call(func=ast.Attribute(value=table, attr="get")):
                if (found := own_attribute(table, own)) is not None:
                    yield found
    for over in gone_through(function, name):
        for node in walk(over):
            if isinstance(node, ast.Attribute) and (found := own_attribute(node, own)) is not None:
                yield found


def taken_out_of(function: Function) -> Iterator[str]:
    """Tables out of which the function takes something."""
    own = function.owner or ""
    for node in function.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=table, attr=way)) if way in TAKING:
                pass
            case ast.Call(func=ast.Attribute(attr="heappop"), args=[table, *_]):
                pass
            case ast.Subscript(value=table, ctx=ast.Del()):
                pass
            case _:
                continue
        if (found := own_attribute(table, own)) is not None:
            yield found


def _tables_of(family: Sequence[Function], name: str, annotation: str) -> Iterator[str]:
    """Tables into which some method puts such records."""
    for method in family:
        for told in method.parameters[1:]:
            said = annotation_of(method, told)
            if said == annotation if said and annotation else told == name:
                yield from put_into(method, told)
        for target, value in assignments(method):
            match target, value:
                case ast.Name(id=made), ast.Call(func=ast.Name(id=of)) if of == annotation:
                    yield from put_into(method, made)
        yield from _declared(method, annotation) if annotation else ()


def _declared(method: Function, annotation: str) -> Iterator[str]:
    """`self.running: list[Job] = []`, whoever fills it: `self.running.extend(jobs)`."""
    for node in method.statements:
        match node:
            case ast.AnnAssign(target=target, annotation=ast.Subscript(value=kind, slice=of)):
                named = {each.id for each in walk(of) if isinstance(each, ast.Name)}
                table = own_attribute(target, method.owner or "")
                if table is not None and annotation in named and last_part(kind) in TABLES:
                    yield table


def takes_from(method: Function, tables: Iterable[str]) -> bool:
    return not set(tables).isdisjoint(taken_out_of(method))


def tables_filled(method: Function) -> set[str]:
    """Tables of the own object into which something goes: `self.running.append(self.waiting.popleft())`."""
    own = method.owner or ""
    stored = (target.value for target, _ in assignments(method) if isinstance(target, ast.Subscript))
    functions = (call.func for call in method.calls if last_name(call) in PUTTING)
    put = (function.value for function in functions if isinstance(function, ast.Attribute))
    return {*filter(None, (own_attribute(each, own) for each in (*stored, *put)))}
