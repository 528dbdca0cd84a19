"""From rewritten drafts to an offer that the apply layer takes."""

import ast
from collections.abc import Iterable, Iterator

from auditor.adopt.draft import Draft, Refused
from auditor.adopt.edits import edits
from auditor.case import Case, Parsed
from auditor.fixes.document import Document
from auditor.model import FixOffer, Safety


def draft_of(file: Parsed) -> Draft:
    """The file as a draft. Raises Refused where it has syntax that cannot be placed."""
    if file.moved:
        raise Refused("it has syntax newer than this Python")
    return Draft.of(file.path, file.text)


def offered(
    pairs: Iterable[tuple[Parsed, Draft]], description: str, safety: Safety = Safety.UNSAFE
) -> FixOffer | None:
    """The differences as one offer; None where there are none."""
    found = [
        edit
        for file, draft in pairs
        for edit in edits(Document(file.path, file.text.encode("utf-8", "surrogatepass")), draft)
    ]
    return FixOffer(safety, description, tuple(found)) if found else None


def files_with(case: Case, word: str) -> Iterator[Parsed]:
    """Every file of the project whose text holds the word. Raises Refused where one cannot be read."""
    for index in case.facts.files:
        file = case.sources.parsed(index.path) if word in case.sources.text(index.path) else None
        if file is not None:
            yield file


def call_at(draft: Draft, line: int, column: int) -> ast.Call | None:
    """The call whose callee begins there; the column counts from 1."""
    for node in ast.walk(draft.tree):
        if isinstance(node, ast.Call) and draft.start(node.func) == (line, column - 1):
            return node
    return None
