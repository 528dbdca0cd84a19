"""One replacement of source text; a fix is a handful of them."""

from dataclasses import dataclass

from auditor.model.span import Span


@dataclass(frozen=True, slots=True)
class Edit:
    """The text at `span` becomes `replacement`; an empty span inserts."""

    span: Span
    replacement: str
