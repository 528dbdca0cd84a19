"""Items put at the end of a list in parentheses, parameters or arguments, in the way that list is written."""

from collections.abc import Sequence
from dataclasses import dataclass

from auditor.adopt.draft import Draft, Place
from auditor.adopt.pooling import WIDEST


@dataclass(frozen=True)
class Listing:
    """A list in parentheses: `opened` is where it begins, behind the parenthesis, and `after` where the last
    element ends; the same place where it is empty.
    """

    draft: Draft
    opened: Place
    after: Place

    def with_items(self, items: Sequence[str]) -> Draft:
        """The list with `items` at its end; one a line where the last element has lines of its own."""
        draft, (row, column) = self.draft, self.after
        text = draft.lines[row - 1]
        rest = text[column:].strip()
        behind = rest.removeprefix(",").strip()
        own_line = row != self.opened[0]
        if own_line and (not behind or behind.startswith("#")):
            return self._own_lines(items, has_comma=rest.startswith(","))
        glue = "" if self.opened == self.after else ", "
        line = glue + ", ".join(items)
        alone = own_line and "," not in text[:column]
        if len(text) + len(line) <= WIDEST and not alone:
            return draft.replaced((self.after, self.after, line))
        if own_line:
            indent = draft.indent(row)
            return draft.replaced((self.after, self.after, f",\n{indent}" + f",\n{indent}".join(items)))
        return self._broken(items)

    def _own_lines(self, items: Sequence[str], *, has_comma: bool) -> Draft:
        draft, indent = self.draft, self.draft.indent(self.after[0])
        rows = [f"{indent}{item}," for item in items]
        if not has_comma:
            rows[-1] = rows[-1].removesuffix(",")
            draft = draft.replaced((self.after, self.after, ","))
        return draft.with_lines(self.after[0] + 1, rows)

    def _broken(self, items: Sequence[str]) -> Draft:
        """A list on one line that grows too long goes inside of its parentheses."""
        row = self.opened[0]
        indent = self.draft.indent(row)
        inner = indent + ("\t" if "\t" in indent else "    ")
        text = self.draft.lines[row - 1]
        there = text[self.opened[1] : self.after[1]]
        behind = text[self.after[1] :].lstrip().removeprefix(",").lstrip()
        whole = ", ".join([*([there] if there else []), *items])
        if len(inner) + len(whole) <= WIDEST:
            rows = [f"{inner}{whole}"]
        else:
            rows = [f"{inner}{each}," for each in [*([there] if there else []), *items]]
            if behind.startswith("*"):
                rows[-1] = rows[-1].removesuffix(",")
        if not behind.startswith(")"):  # `**kwargs` comes last
            last, _, behind = behind.partition(")")
            if len(rows) == 1 and len(rows[0]) + len(last) + 2 <= WIDEST:
                rows[-1] = f"{rows[-1]}, {last}"
            else:
                rows = [*(f"{each.removesuffix(',')}," for each in rows), f"{inner}{last}"]
            behind = f"){behind}"
        return self.draft.replaced(
            (self.opened, (row, len(text)), "\n" + "\n".join([*rows, indent + behind]))
        )
