"""What builtins and the standard library do to a lease: containers, iteration helpers, context-manager
tools."""

from auditor.flow.effects import BORROWED, RELEASED, SAME, TAKEN, Position, Treatment
from auditor.ir.ops import ANY_ITEM, Call, Path, is_temporary

BORROWING = frozenset(
    {"Popen", "len", "print", "isinstance", "id", "type", "repr", "str", "hash", "bool", "hasattr", "any",
    "all",
    "sum", "callable", "range",
     "format", "issubclass", "is_tensor", "debug", "info", "warning", "warn", "error", "exception",
     "critical", "log", "int", "float", "abs",
     "min", "max", "iter_len", "getsizeof", "set_device", "perf_counter", "assert_close", "allclose",
     "memcpy", "memoryview", "synchronize", "readinto", "readinto1", "recv_into", "sendall"}
)  # fmt: skip
SAME_CONTENT = frozenset({"list", "tuple", "set", "frozenset", "sorted", "reversed", "iter", "cast",
                          "deque", "filter", "copy",
                          "deepcopy", "as_completed", "shield", "wait_for", "aiter", "nullcontext",
                          "closing", "aclosing"})  # fmt: skip
RENAMING = frozenset({"replace", "rename", "renames", "move"})
SAME_PATH = frozenset({"realpath", "abspath", "normpath", "expanduser", "fspath", "normcase", "fsdecode",
                       "fsencode", "Path", "PurePath", "PosixPath"})  # fmt: skip
"""Functions whose result names the same file or directory."""

PAIRING = frozenset({"zip", "enumerate", "zip_longest"})
CHAINING = frozenset({"chain", "from_iterable", "gather", "wait", "map", "starmap"})
GIVING_BACK = frozenset({"finalize", "callback", "push", "push_async_callback", "register", "enter_context",
                         "enter_async_context", "closing_later", "addCleanup", "addfinalizer"})  # fmt: skip
APPENDING = frozenset(
    {"append", "appendleft", "add", "put", "put_nowait", "push", "insert", "setdefault", "heappush"}
)
EXTENDING = frozenset({"extend", "extendleft", "update", "union"})
TAKING_OUT = frozenset({"pop", "popleft", "popitem", "get_nowait", "popright"})


def container_method(call: Call, position: Position, rest: Path) -> Treatment | None:
    """A method of the container in which the lease lies at `rest`."""
    name = call.method
    if position != -1 or not rest or call.receiver is None:
        return None
    if not rest[0].startswith("["):
        return None
    inner = rest[1:]
    if name in TAKING_OUT:
        result = (ANY_ITEM, *inner) if name == "popitem" else inner
        return Treatment(result=result, leaves=True)
    if name == "clear":
        return Treatment(leaves=True)
    if name in ("get", "setdefault", "__getitem__"):
        return Treatment(result=inner)
    if name == "items":
        return Treatment(result=(ANY_ITEM, "[1]", *inner))
    if name in ("values", "copy", "queue"):
        return Treatment(result=(ANY_ITEM, *inner))
    if name in ("keys", "index", "count", "sort", "reverse", "remove", "discard"):
        return BORROWED
    return None


def stored_by_method(call: Call, position: Position, rest: Path) -> Treatment | None:
    """The lease is an argument that a container's method keeps."""
    if call.receiver is None or position == -1:
        return None
    if is_temporary(call.receiver) and call.method in APPENDING | EXTENDING:
        return TAKEN  # `table.setdefault(key, []).append(x)`: a container that lives elsewhere
    if call.method in APPENDING:
        return Treatment(moved_to=(*call.receiver, ANY_ITEM, *rest))
    if call.method in EXTENDING:
        inner = rest[1:] if rest and rest[0].startswith("[") else rest
        return Treatment(moved_to=(*call.receiver, ANY_ITEM, *inner))
    return None


def of_paths(dotted: str, position: Position, rest: Path) -> Treatment | None:
    """What os, shutil and pathlib do to a path; what is renamed belongs to whoever knows the new name."""
    module, _, name = dotted.rpartition(".")
    if position != 0 or module not in ("os", "os.path", "posixpath", "shutil", "pathlib"):
        return None
    if name in RENAMING:
        return TAKEN
    return Treatment(result=rest) if name in SAME_PATH else None


def function(call: Call, position: Position, rest: Path) -> Treatment | None:
    """A builtin or well-known function, by its last name."""
    name = call.method
    if name in BORROWING:
        return BORROWED
    if name in SAME_CONTENT and position != -1:
        return Treatment(result=rest)
    if name in PAIRING and position != -1:
        inner = rest[1:] if rest and rest[0].startswith("[") else rest
        index = f"[{position}]" if name != "enumerate" else "[1]"
        if isinstance(position, int) and position < len(call.args) and call.args[position][1]:
            return Treatment(result=(ANY_ITEM, ANY_ITEM, *rest[1:]))  # zip(*rows)
        return Treatment(result=(ANY_ITEM, index, *inner))
    if name in CHAINING and position != -1:
        return Treatment(result=(ANY_ITEM, *(rest[1:] if rest and rest[0].startswith("[") else rest)))
    if name == "next" and position == 0:
        return Treatment(result=rest[1:])
    if name == "getattr" and position == 0:
        return Treatment(result=(), maybe=True)
    if name in GIVING_BACK and position != -1:
        return RELEASED
    if name in ("partial",) and position != -1:
        return Treatment(result=("<partial>", *rest))
    if name == "dict" and position != -1:
        return Treatment(result=(f"[{position!r}]" if isinstance(position, str) else ANY_ITEM, *rest))
    if name in ("create_task", "ensure_future") and position == 0:
        return TAKEN
    return None


__all__ = ["SAME", "container_method", "function", "stored_by_method"]
