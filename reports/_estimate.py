"""What an estimate of bytes grows with: its factors counted by what their names say they measure.

`b*n*h*d*4` says how large a tensor is once its symbols are known; nobody knows them before the code runs. A
reader can assume a batch, a length, a number of heads and a width, and every estimate becomes a number.
"""

import re
from dataclasses import dataclass

_BATCH = re.compile(r"(?:^|[._])(?:b|bs|bsz|nb|batch\w*)(?:$|_)|batch|shape\[0\]", re.IGNORECASE)
_LENGTH = re.compile(
    r"(?:^|[._(])(?:n|l|t|s|m|lq|lk|nq|nk)(?:$|[_ )])|seq|len|token|frame|patch|position|shape\[-2\]",
    re.IGNORECASE,
)
_HEADS = re.compile(r"(?:^|[._])h$|heads", re.IGNORECASE)

MOST_LENGTHS = 2  # nobody makes a tensor cubic in the length: in `b*n*n_q*n_k` the `n` counts heads


@dataclass(frozen=True, slots=True)
class Powers:
    """bytes = factor * batch**b * length**n * heads**h * width**d"""

    factor: int = 1
    batch: int = 0
    length: int = 0
    heads: int = 0
    width: int = 0


def powers(expression: str) -> Powers:
    """How `expression` grows. A size whose name says nothing counts as width."""
    factor = 1
    counts = {"batch": 0, "length": 0, "heads": 0, "width": 0}
    for part in _factors(expression):
        if part.isdecimal():
            factor *= int(part)
            continue
        for kind in _kinds(part):
            counts[kind] += 1
    surplus = max(counts["length"] - MOST_LENGTHS, 0)
    counts["length"] -= surplus
    counts["width" if counts["heads"] else "heads"] += surplus
    return Powers(factor, **counts)


def _kinds(part: str) -> tuple[str, ...]:
    if part.endswith(".shape[:-1].numel()"):  # of queries, (batch, heads, length, width), all but the last
        return ("batch", "heads", "length")
    if part.endswith(".numel()"):
        return ("batch", "length", "width")
    if _HEADS.search(part):
        return ("heads",)
    if _LENGTH.search(part):
        return ("length",)
    return ("batch",) if _BATCH.search(part) else ("width",)


def _factors(expression: str) -> list[str]:
    """The product's parts; a `*` inside brackets belongs to its part."""
    depth, start, parts = 0, 0, []
    for index, char in enumerate(expression):
        depth += (char in "([{") - (char in ")]}")
        if char == "*" and depth == 0:
            parts.append(expression[start:index])
            start = index + 1
    return [part.strip() for part in [*parts, expression[start:]] if part.strip()]
