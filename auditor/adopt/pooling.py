"""`x = torch.zeros(...)` into `with self._lease_tensor(...) as x:` around its life."""

import ast
from dataclasses import dataclass

from auditor.adopt.draft import Draft, Refused
from auditor.adopt.helpers import LEASE, PARAMETER
from auditor.adopt.temporaries import Temporary

WIDEST = 100
"""A header longer than that is broken; what a project's formatter makes of it is the project's."""

_CALLED = {"zeros": "zeros", "ones": "ones", "full": "filled", "empty": "scratch"}


def pooled(draft: Draft, temporary: Temporary) -> Draft:
    """The draft with the tensor leased for as long as anything reaches it."""
    writer = _Writer(draft, temporary)
    return writer.beside_another() if writer.inner is not None else writer.around()


@dataclass(frozen=True)
class _Writer:
    draft: Draft
    temporary: Temporary

    @property
    def inner(self) -> ast.With | None:
        """The `with` over another lease that is all that follows, so that one statement can hold both."""
        region = self.temporary.region
        if self.temporary.name is None or region.last != region.first + 1:
            return None
        match region.block[region.last]:
            case ast.With(items=items) as inner if all(_is_lease(item) for item in items):
                header = self.draft.lines[inner.lineno - 1 : inner.body[0].lineno - 1]
                follows = inner.lineno == (region.statement.end_lineno or 0) + 1
                commented = any("#" in row for row in [*header, self._comment(region.statement)])
                return inner if follows and header and not commented else None
        return None

    def around(self) -> Draft:
        """A `with` of its own, and what it holds one step further in."""
        region, statement = self.temporary.region, self.temporary.region.statement
        indent = self.draft.indent(statement.lineno)
        name = self.temporary.name or self._new_name()
        first, last = self.draft.start(statement)[0], self.draft.end(region.block[region.last])[0]
        head = [*self._annotation(indent), *self._inner_comments(indent)]
        items = [f"{self.temporary.lender}({self.temporary.lent.arguments}) as {name}"]
        header = with_header(indent, items)
        body = self._body(name, indent, first, last)
        header[-1] += self._comment(statement) if self.temporary.name else ""
        lines = self.draft.lines
        return Draft(self.draft.path, (*lines[: first - 1], *head, *header, *body, *lines[last:]))

    def beside_another(self) -> Draft:
        """One `with` for this lease and those that follow at once; nothing is indented again."""
        assert self.inner is not None
        inner, statement = self.inner, self.temporary.region.statement
        name, indent = self.temporary.name, self.draft.indent(statement.lineno)
        own = f"{self.temporary.lender}({self.temporary.lent.arguments}) as {name}"
        others = [
            _on_one_line(self.draft.between(self.draft.start(item.context_expr), _end(self.draft, item)))
            for item in inner.items
        ]
        first = self.draft.start(statement)[0]
        body_first = self.draft.start(inner.body[0])[0]
        body_indent = self.draft.indent(body_first)
        head = [
            *self._annotation(indent),
            *self._inner_comments(indent),
            *with_header(indent, [own, *others]),
        ]
        fill = self._fill(str(name), body_indent)
        between = self.draft.lines[_header_end(self.draft, inner) : body_first - 1]
        lines = self.draft.lines
        return Draft(self.draft.path, (*lines[: first - 1], *head, *fill, *between, *lines[body_first - 1 :]))

    def _body(self, name: str, indent: str, first: int, last: int) -> list[str]:
        """The lines of the region, indented; the one that made the tensor replaced or gone."""
        unit, statement = self._unit(), self.temporary.region.statement
        made_until = self.draft.end(statement)[0]
        if self.temporary.name is not None:
            rest = self._indented(self.draft, made_until + 1, last, unit)
            return [*self._fill(name, indent + unit), *rest]
        call, fill = self.temporary.call, self.temporary.lent.fill
        new = name if fill is None else f"{name}.fill_({fill})"
        changed = self.draft.replaced((self.draft.start(call), self.draft.end(call), new))
        shorter = len(self.draft.lines) - len(changed.lines)
        return self._indented(changed, first, last - shorter, unit)

    def _fill(self, name: str, indent: str) -> list[str]:
        fill = self.temporary.lent.fill
        return [] if fill is None else [f"{indent}{name}.fill_({fill})"]

    def _indented(self, draft: Draft, first: int, last: int, unit: str) -> list[str]:
        inside = draft.inner_lines(first, last) if first <= last else set()
        rows = range(first, last + 1)
        texts = (draft.lines[row - 1] for row in rows)
        return [
            text if row in inside or not text.strip() else unit + text
            for row, text in zip(rows, texts, strict=True)
        ]

    def _unit(self) -> str:
        """One step of indentation, as the block that holds the statement is indented."""
        statement = self.temporary.region.statement
        own = self.draft.indent(statement.lineno)
        parent = self.draft.parents[statement]
        outer = self.draft.indent(getattr(parent, "lineno", 1))
        if not own.startswith(outer) or own == outer:
            raise Refused("its block is indented in a way that cannot be continued")
        return own.removeprefix(outer)

    def _annotation(self, indent: str) -> list[str]:
        """`x: Tensor = ...` keeps its annotation in a statement of its own."""
        match self.temporary.region.statement:
            case ast.AnnAssign(target=target, annotation=annotation) if self.temporary.name is not None:
                return [f"{indent}{self.draft.source(target)}: {self.draft.source(annotation)}"]
        return []

    def _inner_comments(self, indent: str) -> list[str]:
        """Comments between the arguments of a call that is told anew stand before it."""
        call = self.temporary.call
        first, last = call.lineno, call.end_lineno or call.lineno
        if first == last:
            return []
        rows = self.draft.lines[first - 1 : last - 1]
        return [f"{indent}#{row.partition('#')[2]}" for row in rows if "#" in row]

    def _comment(self, statement: ast.stmt) -> str:
        row, column = self.draft.end(statement)
        return self.draft.lines[row - 1][column:].rstrip()

    def _new_name(self) -> str:
        taken = {node.id for node in ast.walk(self.draft.tree) if isinstance(node, ast.Name)}
        taken |= {node.arg for node in ast.walk(self.draft.tree) if isinstance(node, ast.arg)}
        kind = self.temporary.made_by.rpartition(".")[2].removeprefix("new_")
        wanted = _CALLED[kind]
        names = [wanted, f"lent_{wanted}", *(f"{wanted}_{number}" for number in range(2, 100))]
        return next(name for name in names if name not in taken)


def with_header(indent: str, items: list[str]) -> list[str]:
    """`with a as b, c as d:`, over several lines where one would be too long."""
    items = [_on_one_line(item) for item in items]
    line = f"{indent}with {', '.join(items)}:"
    if len(line) <= WIDEST:
        return [line]
    step = "\t" if "\t" in indent else "    "
    if len(items) > 1:
        return [f"{indent}with (", *(f"{indent}{step}{item}," for item in items), f"{indent}):"]
    call, _, name = items[0].rpartition(" as ")
    opened, _, arguments = call.partition("(")
    inner = [arguments[:-1]]
    if len(indent) + len(step) + len(inner[0]) > WIDEST:
        inner = [f"{each}," for each in _parts(inner[0])]
    return [f"{indent}with {opened}(", *(f"{indent}{step}{each}" for each in inner), f"{indent}) as {name}:"]


def _parts(arguments: str) -> list[str]:
    """The arguments, taken apart at the commas between them."""
    parsed = ast.parse(f"f({arguments})", mode="eval").body
    assert isinstance(parsed, ast.Call)
    whole = f"f({arguments})".encode()
    nodes: list[ast.expr | ast.keyword] = [*parsed.args, *parsed.keywords]
    return [whole[each.col_offset : each.end_col_offset].decode() for each in nodes]


def _on_one_line(text: str) -> str:
    """Source over several lines on one; comments in it were saved before."""
    rows = [row.partition("#")[0] if "\n" in text else row for row in text.split("\n")]
    joined = " ".join(row.strip() for row in rows)
    return joined if '"' in joined or "'" in joined else joined.replace("( ", "(").replace(" )", ")")


def _is_lease(item: ast.withitem) -> bool:
    match item.context_expr:
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr=name)):
            return name == LEASE and item.optional_vars is not None
        case ast.Call(func=ast.Name(id=name)):
            return name == PARAMETER and item.optional_vars is not None
    return False


def _end(draft: Draft, item: ast.withitem) -> tuple[int, int]:
    assert item.optional_vars is not None
    return draft.end(item.optional_vars)


def _header_end(draft: Draft, inner: ast.With) -> int:
    """The last line of the header: the one that holds the colon after the last item."""
    row = _end(draft, inner.items[-1])[0]
    while not draft.lines[row - 1].partition("#")[0].rstrip().endswith(":"):
        row += 1
    return row
