"""Blanks what the index need not parse, keeping every line number.

Most of a tree of models is code in which no large tensor is born. Parsing is the whole cost of the index, so
before `ast.parse` sees a file, its top-level blocks are cut by indentation and replaced by empty lines unless
they are imports, class headers, or classes whose forward path may allocate.
"""

import re
from itertools import pairwise

# A line that starts a top-level statement. Closing brackets, comments and text in strings do not.
_TOP = re.compile(r"^(?=[A-Za-z_@])", re.MULTILINE)
_HEADER = re.compile(r"class\s+\w+\s*(?:\((?:[^()#]|\([^()#]*\))*\))?\s*:[ \t]*(?:#[^\n]*)?\n")
_METHOD = re.compile(r"^    (?:async )?def (\w+)\(", re.MULTILINE)
_MEMBER = re.compile(r"^    (?=[A-Za-z_@])", re.MULTILINE)
_SELF_CALL = re.compile(r"\bself\.(\w+)\(")

# A method without any of these allocates nothing that the index could call large. Plain substrings: `in` runs
# at memory speed where an alternation of the same words costs more than the parse it saves.
_FACTORY = (
    "zeros(", "ones(", "empty(", "full(", "rand(", "randn(", "randint(", "eye(", "s_like(", "empty_like(",
    "full_like(", "rand_like(", "randn_like(", "matmul(", "bmm(", "einsum(", " @ ",
)  # fmt: skip
# These are large only where a shape is known, and a shape is known only where the method writes one down.
_GROWS = (
    "tril(", "triu(", "one_hot(", "arange(", "cat(", "concat(", "stack(", "repeat(", "gather(", "softmax(",
    "clone(", "contiguous(", "pad(",
)  # fmt: skip
_SHAPED = (".shape", ".size(", "view(", "reshape(", "arange(")
# An own `__init__` ends what a class inherits, and a `forward(self` says that it is a module.
_STUBS = (
    (re.compile(r"^    def __init__\(", re.MULTILINE), "    def __init__(self): pass"),
    (re.compile(r"^    def forward\((?:\s|#.*\n)*self\b", re.MULTILINE), "    def forward(self): pass"),
)
ENTRY_POINTS = ("forward", "__call__")


class Uncut(Exception):
    """The file has to be read whole: cutting it by indentation would not be sound."""


def outline(text: str) -> str:
    """`text` with the same lines, but of each class only its header and what allocates on its forward path.

    Every method that is left is on the forward path. Raises `Uncut`.
    """
    if "\r" in text:
        raise Uncut
    return "".join(map(_keep, _cut(text, _TOP)))


def _cut(text: str, start: re.Pattern[str]) -> list[str]:
    """The text before the first start, and from each to the next; one inside a triple-quoted string is
    none.
    """
    starts = [0, *(match.start() for match in start.finditer(text))]
    blocks: list[str] = []
    open_string = False
    for first, last in pairwise([*starts, len(text)]):
        piece = text[first:last]
        if open_string:
            blocks[-1] += piece
        else:
            blocks.append(piece)
        open_string ^= bool((piece.count('"""') + piece.count("'''")) & 1)
    if open_string:
        raise Uncut
    return blocks


def _keep(block: str) -> str:
    if block.startswith("class "):
        return _keep_class(block)
    if block.startswith(("import ", "from ")):
        return block
    if block.startswith(("if ", "try:", "else:", "elif ", "except", "finally:")):
        if "class " in block and any(f"def {name}(" in block for name in ENTRY_POINTS):
            raise Uncut
        return block
    return "\n" * block.count("\n")


def _keep_class(block: str) -> str:
    header = _HEADER.match(block)
    if header is None:  # `class A(B): ...`, or a header too odd to find its end
        if "def " in block:
            raise Uncut
        return block
    body = block[header.end() :]
    kept = ""
    if any(f"    def {name}(" in body for name in ENTRY_POINTS) and _may_allocate(body):
        kept = _keep_methods(body)
    return header.group() + (kept or _stubbed(body))


def _stubbed(body: str) -> str:
    """What is known of a body that is cut away: whether it defines `__init__`, and a `forward` of a
    module.
    """
    stubs = [stub for start, stub in _STUBS if start.search(body)]
    lines = body.count("\n")
    if not stubs or lines < len(stubs):
        return "    pass" + "\n" * lines
    return "\n".join(stubs) + "\n" * (lines - len(stubs) + 1)


def _keep_methods(body: str) -> str:
    """The methods on the forward path that may allocate; empty where there is none."""
    members = _cut(body, _MEMBER)
    wanted = {index for index in _on_forward_path(members) if _may_allocate(members[index])}
    if not wanted:
        return ""
    wanted |= {index for index, member in enumerate(members) if _decorates(member, index, wanted)}
    return "".join(member if index in wanted else _blank(member) for index, member in enumerate(members))


def _blank(member: str) -> str:
    stub = next((stub for start, stub in _STUBS if start.match(member)), "")
    return stub + "\n" * member.count("\n")


def _decorates(member: str, index: int, wanted: set[int]) -> bool:
    # A decorator is a member of its own in this cut; it belongs to the method below it.
    return member.startswith("    @") and index + 1 in wanted


def _may_allocate(text: str) -> bool:
    if any(word in text for word in _FACTORY):
        return True
    return any(word in text for word in _SHAPED) and any(word in text for word in _GROWS)


def _on_forward_path(members: list[str]) -> set[int]:
    by_name: dict[str, int] = {}
    for index, member in enumerate(members):
        method = _METHOD.match(member)
        if method is not None:
            by_name[method.group(1)] = index
    waiting = [name for name in ENTRY_POINTS if name in by_name]
    reached: set[int] = set()
    while waiting:
        index = by_name[waiting.pop()]
        if index not in reached:
            reached.add(index)
            waiting += [name for name in self_calls(members[index]) if name in by_name]
    return reached


def self_calls(text: str) -> list[str]:
    """The methods that a method's text calls on self."""
    return _SELF_CALL.findall(text)
