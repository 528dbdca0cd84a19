"""Blanks what the index need not parse, keeping every line number.

Most of a tree of models is code in which no large tensor is born. Parsing is the whole cost of the index, so
before `ast.parse` sees a file, its top-level blocks are cut by indentation and replaced by empty lines unless
they are imports, class headers, or classes whose forward path may allocate.
"""

import re

# A line that starts a top-level statement. Closing brackets, comments and text in strings do not.
_TOP = re.compile(r"^(?=[A-Za-z_@])", re.MULTILINE)
_HEADER = re.compile(r"class\s+\w+\s*(?:\((?:[^()#]|\([^()#]*\))*\))?\s*:[ \t]*(?:#[^\n]*)?\n")
_METHOD = re.compile(r"^    (?:async )?def (\w+)\(", re.MULTILINE)
_MEMBER = re.compile(r"^    (?=[A-Za-z_@])", re.MULTILINE)
_SELF_CALL = re.compile(r"\bself\.(\w+)\(")

# An operation that can make a large tensor, as it is spelled; a class without any is not parsed.
ALLOCATES = re.compile(
    r"\b(?:zeros|ones|empty|full|rand|randn|randint|eye|zeros_like|ones_like|empty_like|full_like|rand_like"
    r"|randn_like|new_zeros|new_ones|new_empty|new_full|matmul|bmm|baddbmm|einsum|tril|triu|one_hot|cdist"
    r"|outer|pad|cat|stack|repeat|repeat_interleave|gather|contiguous|softmax|arange)\(| @ "
)
ENTRY_POINTS = ("forward", "__call__")


def outline(text: str) -> str | None:
    """`text` with the same lines but only what the index reads, or None where cutting would not be sound."""
    if "\r" in text:
        return None
    starts = [match.start() for match in _TOP.finditer(text)]
    blocks = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    if any(block.count('"""') & 1 or block.count("'''") & 1 for block in blocks):
        return None  # a string runs over a top-level line: indentation says nothing here
    head = text[: starts[0]] if starts else text
    return "\n" * head.count("\n") + "".join(map(_keep, blocks))


def _keep(block: str) -> str:
    if block.startswith("class "):
        return _keep_class(block)
    if block.startswith(("import ", "from ")):
        return block
    if block.startswith(("if ", "try:", "else:", "elif ", "except", "finally:")):
        return block
    return "\n" * block.count("\n")


def _keep_class(block: str) -> str:
    header = _HEADER.match(block)
    if header is None:
        return block
    body = block[header.end() :]
    kept = _keep_methods(body) if "def forward(" in body or "def __call__(" in body else None
    if kept is None:
        kept = "    pass" + "\n" * body.count("\n")
    return header.group() + kept


def _keep_methods(body: str) -> str | None:
    """The methods on the forward path that may allocate; None where there is none."""
    starts = [match.start() for match in _MEMBER.finditer(body)]
    if not starts:
        return body
    members = [body[a:b] for a, b in zip(starts, [*starts[1:], len(body)], strict=True)]
    if any(member.count('"""') & 1 or member.count("'''") & 1 for member in members):
        return body
    wanted = _on_forward_path(members)
    if not any(ALLOCATES.search(members[index]) for index in wanted):
        return None
    head = "\n" * body[: starts[0]].count("\n")
    return head + "".join(
        _with_decorators(member, index, wanted) for index, member in enumerate(members)
    )


def _with_decorators(member: str, index: int, wanted: set[int]) -> str:
    # A decorator is a member of its own in this cut; it belongs to the method below it.
    if index in wanted or (member.startswith("    @") and index + 1 in wanted):
        return member
    return "\n" * member.count("\n")


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
            waiting += [name for name in _SELF_CALL.findall(members[index]) if name in by_name]
    return reached
