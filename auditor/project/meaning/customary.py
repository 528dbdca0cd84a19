"""How a project gives most of its leases back, counted over the releases that it has."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from auditor.flow.lease import Lease


def customary(leases: Iterable[Lease], lines_of: Callable[[str], Sequence[str]]) -> dict[str, str]:
    """By protocol, the method of the lease itself by which the project gives most of them back."""
    used: dict[str, Counter[str]] = {}
    for lease in leases:
        for span in lease.releases:
            line = lines_of(span.path)[span.line - 1][span.column - 1 : span.end_column - 1]
            method = re.fullmatch(r"\w+\.(\w+)\(\)", line)
            used.setdefault(lease.protocol, Counter())[f"{{}}.{method[1]}()" if method else ""] += 1
    found = {}
    for protocol, forms in used.items():
        form, count = min(forms.items(), key=lambda item: (-item[1], item[0]))
        if form and count > 1:
            found[protocol] = form
    return found
