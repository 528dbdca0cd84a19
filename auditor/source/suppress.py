"""Inline comments that silence findings: `# poolaudit: ignore[PA101]`."""

import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from auditor.model import Finding, Span

MARK = "poolaudit:"
_COMMENT = re.compile(r"poolaudit:\s*ignore(?![\w-])(?:\s*\[([^\]]*)\])?")


@dataclass(frozen=True, slots=True)
class Suppression:
    """One comment. `codes` is empty for a bare `ignore`; `line` is the line whose findings it silences.

    `used` lists the codes that really silenced a finding.
    """

    span: Span
    line: int
    codes: tuple[str, ...]
    used: tuple[str, ...] = ()

    def silences(self, code: str) -> bool:
        return not self.codes or any(prefix and code.startswith(prefix) for prefix in self.codes)


def suppressions(path: str, text: str) -> tuple[Suppression, ...]:
    """The suppression comments of one valid file, by line. Only files that contain the mark are tokenized."""
    if MARK not in text:
        return ()
    return tuple(_in_comments(path, tokenize.generate_tokens(io.StringIO(text, newline=None).readline)))


def _in_comments(path: str, tokens: Iterable[tokenize.TokenInfo]) -> Iterator[Suppression]:
    for token in tokens:
        match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
        if match is None:
            continue
        line, column = token.start
        alone = not token.line[:column].strip()
        start = column + match.start() + 1
        span = Span(path, line, start, line, start + len(match[0]))
        yield Suppression(span, line + alone, _codes(match[1]))


def _codes(listed: str | None) -> tuple[str, ...]:
    """The codes between the brackets. Empty brackets are not the bare form: they silence nothing."""
    if listed is None:
        return ()
    return tuple(code.strip() for code in listed.split(",") if code.strip()) or ("",)


def silence(
    findings: Sequence[Finding], comments: Sequence[Suppression]
) -> tuple[list[Finding], tuple[Suppression, ...]]:
    """The findings that no comment silences, and the comments with what each of them silenced."""
    used: dict[Suppression, set[str]] = {comment: set() for comment in comments}
    at: dict[tuple[str, int], list[Suppression]] = {}
    for comment in comments:
        at.setdefault((comment.span.path, comment.line), []).append(comment)
    kept = []
    for finding in findings:
        silencing = [
            c for c in at.get((finding.span.path, finding.span.line), ()) if c.silences(finding.code)
        ]
        for comment in silencing:
            used[comment].add(finding.code)
        if not silencing:
            kept.append(finding)
    return kept, tuple(replace(comment, used=tuple(sorted(codes))) for comment, codes in used.items())
