"""Tests after which a lease is owed no more: it says that it is closed, or it never was one.

`if not f.closed: f.close()`, `if lock.locked(): lock.release()`, `if fd > 2: os.close(fd)`."""

import ast

CLOSED = frozenset({"closed", "is_closed", "is_closing", "isclosed", "released", "is_released"})
OPEN = frozenset({"is_open", "isOpen", "locked", "is_locked", "i_am_locking", "is_held", "is_alive",
                  "owned", "is_owned", "acquired", "is_acquired"})  # fmt: skip
"""What leases, locks and processes say of themselves, as attributes or as methods without arguments."""

PLAIN = frozenset({"str", "bytes", "bytearray", "unicode", "basestring", "text_type", "string_types",
                   "binary_type", "PathLike", "Path", "PurePath"})  # fmt: skip
"""Types of what a file is opened by."""

OF_A_FILE = frozenset({"read", "write", "seek", "close"})
ENDS = {"over": True, "going": False, "standard": True, "above": False, "plain": True, "file": False}
"""Kinds of conditions, and the truth with which each says that its subject is not held (any more): an
object that is closed or still open; a descriptor that is one of the standard streams or above them; no
file at all."""


def asks_itself(asked: ast.expr) -> tuple[ast.expr, str] | None:
    """The object that `file.closed`, `lock.locked()` or `await lock.owned()` asks, and the kind of the
    answer."""
    asked = asked.value if isinstance(asked, ast.Await) else asked
    callee = asked.func if isinstance(asked, ast.Call) and not (asked.args or asked.keywords) else asked
    if not isinstance(callee, ast.Attribute) or callee.attr not in CLOSED | OPEN:
        return None
    return callee.value, "over" if callee.attr in CLOSED else "going"


def asks_for_a_file(asked: ast.expr) -> tuple[ast.expr, str] | None:
    """What `isinstance(f, str)` or `hasattr(f, "read")` asks about, and the kind of the answer: an open file
    is no name and can be read."""
    match asked:
        case ast.Call(func=ast.Name(id="isinstance"), args=[tested, kinds], keywords=[]):
            named = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
            return (tested, "plain") if all(_last_name(kind) in PLAIN for kind in named) else None
        case ast.Call(func=ast.Name(id="hasattr"), args=[tested, ast.Constant(value=name)], keywords=[]):
            return (tested, "file") if name in OF_A_FILE else None
    return None


def asks_for_a_stream(asked: ast.Compare) -> str | None:
    """Whether a descriptor is compared with those of the standard streams: the kind of the answer."""
    op, right = asked.ops[0], asked.comparators[0]
    number = right.value if isinstance(right, ast.Constant) else None
    if isinstance(op, (ast.In, ast.NotIn)) or (isinstance(op, (ast.Eq, ast.NotEq)) and number in (0, 1, 2)):
        return "standard"
    return "above" if isinstance(op, (ast.Gt, ast.LtE)) and number == 2 else None


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
