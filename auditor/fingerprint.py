"""Names for findings that survive moved lines, renamed files and reformatted code."""

import ast
import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from auditor.excerpts import LinesOf, text_at
from auditor.model import Finding

HALF = 8  # hexadecimal digits: the first half says what was found, the second in which function


def fingerprinted(findings: Iterable[Finding], lines_of: LinesOf) -> list[Finding]:
    """`findings`, in the same order, each with its fingerprint.

    Its first half is made of the rule and the acquire's code; its second of the symbol and, for findings
    alike in all of these within one file, which of them it is. Neither line nor path goes in; so a baseline
    matches them as a multiset.
    """
    met: Counter[tuple[str, ...]] = Counter()
    named = []
    for finding in findings:
        what = (finding.code, canonical(text_at(finding.span, lines_of(finding.span.path))))
        about = (finding.span.path, finding.symbol, *what)
        fingerprint = _digest(*what) + _digest(finding.symbol, str(met[about]))
        met[about] += 1
        named.append(replace(finding, fingerprint=fingerprint))
    return named


def what(fingerprint: str) -> str:
    """The part that stays when the function is renamed."""
    return fingerprint[:HALF]


def canonical(text: str) -> str:
    """`text` as Python itself would write it: quotes, brackets, commas, breaks and comments do not matter.

    It is an expression, a statement or the first line of one; of anything else white space is evened.
    """
    for whole in (f"({text}\n)", text, f"{text} pass"):
        try:
            with warnings.catch_warnings(action="ignore"):  # of odd escapes; the code is not ours
                return ast.unparse(ast.parse(whole))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return " ".join(text.split())


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:HALF]
