"""What a method does to fields of its object by calling others of its methods: `self.push(item)`."""

import ast
from collections.abc import Iterator, Mapping, Sequence

from auditor.project.code.bindings import own_attribute
from auditor.project.shapes.field_work import FieldWork, Put

Works = Mapping[str, FieldWork]
"""The methods of one class, by name."""


def by_name(works: Sequence[FieldWork]) -> Works:
    return {work.method.name: work for work in works}


def all_put(work: FieldWork, works: Works) -> Iterator[tuple[Put, ast.AST]]:
    """Each with the place in the text where it happens; what a helper is told is the whole call's."""
    for put in work.put:
        yield put, put.value
    own = work.method.owner
    for call in work.method.calls:
        helper = works.get(own_attribute(call.func, own) or "") if own is not None else None
        if helper is None or helper is work or not call.args:
            continue
        for field in sorted({put.field for put in helper.put if helper.is_from_told(put.value)}):
            yield Put(field, None, call), call
