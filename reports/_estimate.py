"""What an estimate of bytes grows with: its factors counted by what their names say they measure.

`b*n*h*d*4` says how large a tensor is once its symbols are known; nobody knows them before the code runs. A
reader can assume a batch, a length, a number of heads and a width, and every estimate becomes a number.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_BATCH = re.compile(r"(?:^|[._])(?:b|bs|bsz|nb|batch\w*)(?:$|_)|batch|shape\[0\]", re.IGNORECASE)
_LENGTH = re.compile(
    r"(?:^|[._(])(?:n|l|t|s|m|lq|lk|nq|nk)(?:$|[_ )])|seq|len|token|frame|patch|position|shape\[-2\]",
    re.IGNORECASE,
)
_HEADS = re.compile(r"(?:^|[._])h$|heads", re.IGNORECASE)

MOST_LENGTHS = 2  # nobody makes a tensor cubic in the length: in `b*n*n_q*n_k` the `n` counts heads
ASSUMED = {"batch": 1, "length": 8192, "heads": 16, "width": 1024}
"""What the page begins with and every other report counts with; each report says so."""
MOST_BYTES = 1024**7  # more than any machine has
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass(frozen=True, slots=True)
class Powers:
    """bytes = factor * batch**b * length**n * heads**h * width**d"""

    factor: int = 1
    batch: int = 0
    length: int = 0
    heads: int = 0
    width: int = 0


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of the product, and what it counts as; a number counts as nothing."""

    text: str
    kinds: tuple[str, ...] = ()


def powers(expression: str) -> Powers:
    """How `expression` grows. A size whose name says nothing counts as width."""
    constant = 1
    counts: Counter[str] = Counter()
    for factor in factors(expression):
        if not factor.kinds:
            constant *= int(factor.text)
        counts.update(factor.kinds)
    return Powers(constant, **counts)


def factors(expression: str) -> list[Factor]:
    """Each with what it counts as."""
    parts = [Factor(part, _kinds(part)) for part in _parts(expression)]
    counts = Counter(kind for part in parts for kind in part.kinds)
    surplus = counts["length"] - MOST_LENGTHS
    other = "width" if counts["heads"] else "heads"
    for index, part in enumerate(parts):
        if surplus > 0 and "length" in part.kinds:
            kinds = (other if kind == "length" else kind for kind in part.kinds)
            parts[index] = Factor(part.text, tuple(kinds))
            surplus -= 1
    return parts


def size(expression: str) -> str:
    """The estimate as a number of bytes under `ASSUMED`, such as `4.0 GiB`."""
    grown = powers(expression)
    amount = grown.factor
    for kind, assumed in ASSUMED.items():
        amount *= int(assumed ** getattr(grown, kind))
    amount = min(amount, MOST_BYTES)
    unit = min((amount.bit_length() - 1) // 10 if amount else 0, len(UNITS) - 1)
    shown = amount / 1024**unit
    return f"{shown:.0f} {UNITS[unit]}" if shown >= 100 or not unit else f"{shown:.1f} {UNITS[unit]}"


def assumptions(expression: str) -> Iterator[tuple[str, str]]:
    """Each symbol once, and what it is assumed to be: `n` is `length 8,192`."""
    said: dict[str, list[str]] = {}
    for factor in factors(expression):
        if factor.kinds:
            value = " * ".join(f"{kind} {ASSUMED[kind]:,}" for kind in factor.kinds)
            said.setdefault(factor.text, []).append(value)
    for symbol, values in said.items():
        yield symbol, ", then ".join(dict.fromkeys(values))


def _kinds(part: str) -> tuple[str, ...]:
    if part.isdecimal():
        return ()
    if part.endswith(".shape[:-1].numel()"):  # of queries, (batch, heads, length, width), all but the last
        return ("batch", "heads", "length")
    if part.endswith(".numel()"):
        return ("batch", "length", "width")
    if _HEADS.search(part):
        return ("heads",)
    if _LENGTH.search(part):
        return ("length",)
    return ("batch",) if _BATCH.search(part) else ("width",)


def _parts(expression: str) -> list[str]:
    """The product's parts; a `*` inside brackets belongs to its part."""
    depth, start, parts = 0, 0, []
    for index, char in enumerate(expression):
        depth += (char in "([{") - (char in ")]}")
        if char == "*" and depth == 0:
            parts.append(expression[start:index])
            start = index + 1
    return [part.strip() for part in [*parts, expression[start:]] if part.strip()]
