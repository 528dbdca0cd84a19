"""Records that are told not to own what they hold, though nobody else has it: `queue.put(Job(ticket,
owns=False))`, where whoever takes jobs out of the queue says `if job.owns: quota.redeem(job.ticket)`."""

import ast
from collections.abc import Iterable, Iterator, Set

from auditor.flow.follow import known_at_nodes
from auditor.flow.lease import Field, StoredField
from auditor.ir.ops import Call
from auditor.project.code.modules import Class, Function
from auditor.project.code.project import Project
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.in_others import only_worked_with
from auditor.project.fields.in_records import Part, Records
from auditor.project.fields.items_again import items_of
from auditor.project.meaning.records_told import fields_told
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk


def told_not_to_own(records: Records, outcomes: Iterable[Outcome]) -> Iterator[tuple[Outcome, StoredField]]:
    """Where all that ends what is in such a field asks for the flag first."""
    for part in (each for outcome in outcomes for each in records.parts(outcome)):
        if part.made is None or not part.alone:
            continue
        ends = records.recogniser.ending_names(part.outcome.acquisition.protocol)
        told = fields_told(records.recogniser.calls, part.record, part.made)
        for flag, value in sorted((flag, value) for flag, value in told if isinstance(value, bool)):
            if _ends_only_by(records, part, flag, not value, ends):
                field = Field(part.record.qualname, part.field, part.record.name)
                yield part.outcome, StoredField(field, part.outcome.lease.span)
                break


def _ends_only_by(records: Records, part: Part, flag: str, asked: bool, ends: Set[str]) -> bool:
    """Some function gives back what is in the field where the flag is as `asked`, and none otherwise."""
    ending = list[Function]()

    def under_it(function: Function) -> set[int]:
        found = set(_read_where(function, part.field, flag, asked, ends))
        if found:
            ending.append(function)
        return found | set(_of_other_tables(function, part))

    project = records.project
    if _is_set_later(project, flag, part.record) or not any(_tells_otherwise(records, part, flag)):
        return False
    return only_worked_with(project, part.field, ends=ends, aside=under_it) and bool(ending)


def _read_where(function: Function, field: str, flag: str, asked: bool, ends: Set[str]) -> Iterator[int]:
    """Where a call that ends something reads the field of an object that has been asked for its flag."""
    ending = [
        (call, node)
        for call in function.calls
        if last_name(call) in ends or looks_releasing(call)
        for node in walk(call)
        if isinstance(node, ast.Attribute) and node.attr == field
    ]
    graph = function.graph
    known = known_at_nodes(graph) if ending else {}
    for call, node in ending:
        fact = (f"{ast.unparse(node.value)}.{flag}", asked)
        nodes = [at for at, op in enumerate(graph.ops) if isinstance(op, Call) and op.at is call]
        if nodes and all(fact in known.get(at, ()) for at in nodes):
            yield id(node)


def _of_other_tables(function: Function, part: Part) -> Iterator[int]:
    """`for job in self.waiting`, where this record lies in another table of that object."""
    if not part.tables or function.cls is not part.outcome.function.cls:
        return
    for node in function.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=field) if field == part.field:
                if items_of(function, name) not in {"", *part.tables}:
                    yield id(node)


def _is_set_later(project: Project, flag: str, record: Class) -> bool:
    """`job.owns = True`, by anybody but the constructor, or in a file that nobody has read."""
    read = {module.path: module for module in project.parsed()}
    return any(
        path not in read
        or any(
            isinstance(node, ast.Attribute) and node.attr == flag and isinstance(node.ctx, ast.Store)
            for function in list(read[path].by_node.values())
            if function.cls is not record or function.name != "__init__"
            for node in function.nodes
        )
        for path, _ in project.mentioning(flag)
    )


def _tells_otherwise(records: Records, part: Part, flag: str) -> Iterator[bool]:
    """Another record of the kind that has its lease for itself, which is what the flag is for."""
    calls = records.recogniser.calls
    assert part.made is not None
    ours = dict(fields_told(calls, part.record, part.made)).get(flag)
    for module in records.project.parsed():
        for function in list(module.by_node.values()) if part.record.name in module.text else ():
            for made in function.calls:
                if made is not part.made and records.model.callee(function, made.func) is part.record:
                    yield dict(fields_told(calls, part.record, made)).get(flag) != ours
