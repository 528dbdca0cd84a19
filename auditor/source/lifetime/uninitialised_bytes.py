"""Whether a file's bytes leave room for memory that is read before it is written.

Most of it is written at once, and those files need no syntax tree for this."""

import re

from auditor.source.searched import Searched

_OTHERS = (
    (b"Tensor(", re.compile(rb"Tensor\(\d+(?:, ?\d+)*\)")),
    (b"where=", re.compile(rb"(?:np|numpy)\.\w+\([^\n]*where=")),
)
"""A word, and where it stands if memory is made by other names than `empty`."""

_LITERAL = re.compile(rb"\.(?:empty(?:_like)?|new_empty)\(")
_MADE = re.compile(rb"(?:^[ \t]*(\w+)[^\n=(]*=[ \t]*)?\b(?:torch|np|numpy|cp|cupy)$")  # a line up to there
_MADE_LIKE = re.compile(rb"(?:^[ \t]*(\w+)[^\n=(]*=[ \t]*)?[\w.\]]+$")  # `x.new_empty(`
_ARITHMETIC = re.compile(rb"[ \t]*(?:[-+@/]|\*)")
_BEFORE = re.compile(rb"[-+@/*][ \t]*$")
_READING_METHOD = re.compile(
    rb"\.(?:\w+_|sum|mean|max|min|norm|abs|exp|log|sqrt|dot|matmul|clone|tolist|T|mT)\b"
)
_METADATA = re.compile(rb"\.(?:shape|size|dtype|device|ndim|stride|numel|nbytes|dim|is_contiguous)\b")
_WRITING_METHOD = re.compile(
    rb"\.(?:zero_|fill_|copy_|normal_|uniform_|random_|bernoulli_|exponential_|index_copy_|masked_fill_|set_|resize_)\("
)
_CALLEE = re.compile(rb"([\w.]*\w)\([^()\n]*$")
LONGEST_CALL = 400
LOOKED_AT = 4000


def may_read_unwritten(file: Searched) -> bool:
    data = file.data
    if any(file.has(word) and pattern.search(data) is not None for word, pattern in _OTHERS):
        return True
    if not (file.has(b".empty") or file.has(b".new_empty(")):
        return False
    return any(_suspect(data, literal) for literal in _LITERAL.finditer(data))


def _suspect(data: bytes, literal: re.Match[bytes]) -> bool:
    begins = max(data.rfind(end, 0, literal.start()) for end in (b"\n", b"\r")) + 1
    line = data[begins : literal.start()]
    made = (_MADE_LIKE if literal.group().startswith(b".new") else _MADE).search(line)
    if made is None:
        return False
    end = _closing(data, literal.end(), b"(", b")")
    if _ARITHMETIC.match(data, end) is not None or _BEFORE.search(line[: made.start()]) is not None:
        return True
    name = made.group(1)
    if name is None or data[end : end + 1] not in (b"\n", b"\r", b" ", b""):
        return False
    for mention in re.finditer(rb"(?<![\w.])" + name + rb"\b", data[end : end + LOOKED_AT]):
        at = end + mention.end()
        if _METADATA.match(data, at) is None:
            return _reads(data, end + mention.start(), at)
    return False


def _reads(data: bytes, start: int, end: int) -> bool:
    """What stands around the first mention that matters."""
    if data[end : end + 1] == b"[":
        end = _closing(data, end + 1, b"[", b"]")
        if re.match(rb"[ \t]*=(?!=)", data[end : end + 8]) is not None:
            return False
    if (
        _ARITHMETIC.match(data, end) is not None
        or _BEFORE.search(data[max(0, start - 4) : start]) is not None
    ):
        return True
    if data[end : end + 1] == b".":
        return _READING_METHOD.match(data, end) is not None and _WRITING_METHOD.match(data, end) is None
    callee = _CALLEE.search(data[max(0, start - 120) : start])
    if callee is None:
        return (
            re.match(rb"[ \t]*=(?!=)", data[end : end + 8]) is None
            and b"] = " in data[max(0, start - 40) : start]
        )
    called = callee.group(1)
    return called.startswith((b"torch.", b"np.", b"numpy.")) or b"def " + called + b"(" in data


def _closing(data: bytes, start: int, opening: bytes, closing: bytes) -> int:
    """Behind the bracket that closes the one before `start`."""
    depth = 1
    for at in range(start, min(len(data), start + LONGEST_CALL)):
        one = data[at : at + 1]
        depth += (one == opening) - (one == closing)
        if depth == 0:
            return at + 1
    return start
