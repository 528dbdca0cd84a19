"""Names for findings that survive moved lines and renamed files."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from auditor.excerpts import LinesOf, text_at
from auditor.model import Finding


def fingerprinted(findings: Iterable[Finding], lines_of: LinesOf) -> list[Finding]:
    """`findings`, in the same order, each with its fingerprint.

    It is made of the rule, the symbol, the text of the acquire and, for findings alike in all of these within
    one file, which of them it is. Neither line nor path goes in; so a baseline matches them as a multiset.
    """
    met: Counter[tuple[str, ...]] = Counter()
    named = []
    for finding in findings:
        about = (finding.code, finding.symbol, text_at(finding.span, lines_of(finding.span.path)))
        ordinal = met[finding.span.path, *about]
        met[finding.span.path, *about] += 1
        digest = hashlib.sha256("\0".join((*about, str(ordinal))).encode("utf-8", "replace"))
        named.append(replace(finding, fingerprint=digest.hexdigest()[:16]))
    return named
