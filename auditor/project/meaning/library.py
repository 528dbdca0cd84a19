"""What builtins and the standard library do to a lease: containers, iteration helpers, context-manager
tools."""

import ast
import re
from collections.abc import Mapping

from auditor.flow.effects import BORROWED, RELEASED, SAME, TAKEN, Position, Treatment
from auditor.flow.indirect import OVER
from auditor.flow.operands import operands
from auditor.ir.ops import ANY_ITEM, TO_COME, Call, Path, is_temporary
from auditor.project.meaning.exit_stacks import PUTTING

BORROWING = frozenset(
    {"Popen", "len", "print", "isinstance", "id", "type", "repr", "str", "hash", "bool", "hasattr", "any",
    "all",
    "sum", "callable", "range",
     "format", "issubclass", "is_tensor", "debug", "info", "warning", "warn", "error", "exception",
     "critical", "log", "float", "abs",
     "min", "max", "iter_len", "getsizeof", "set_device", "perf_counter", "assert_close", "allclose",
     "memcpy", "synchronize", "readinto", "readinto1", "recv_into", "recvfrom_into", "recvmsg_into",
     "sendall", "sendmsg", "pack_into", "unpack_from", "bytes",
     "bytearray", "parse", "readfp", "read_file"}
)  # fmt: skip
SAME_CONTENT = frozenset({"list", "tuple", "set", "frozenset", "sorted", "reversed", "iter", "cast",
                          "deque", "filter", "islice", "nlargest", "nsmallest", "copy",
                          "deepcopy", "as_completed", "shield", "wait_for", "aiter", "nullcontext",
                          "closing", "aclosing"})  # fmt: skip
ON_DEMAND = frozenset({"iter", "aiter", "cast", "filter", "islice", "closing", "aclosing", "nullcontext",
                       "wait_for", "shield"})  # fmt: skip
"""Those that ask a generator for nothing yet."""

ADDRESSES = frozenset({"c_void_p", "c_int", "c_size_t", "c_uint64"})
"""What makes an address or a descriptor of another type of number: it is the same one."""

COPIES = frozenset({"copy", "deepcopy"})
RENAMING = frozenset({"replace", "rename", "renames", "move"})
SAME_PATH = frozenset({"realpath", "abspath", "normpath", "expanduser", "fspath", "normcase", "fsdecode",
                       "fsencode", "Path", "PurePath", "PosixPath"})  # fmt: skip
"""Functions whose result names the same file or directory."""

FILES = frozenset({"os", "shutil"})
LOOKING = frozenset(
    {"mkdir", "makedirs", "listdir", "walk", "scandir", "chmod", "chown", "stat", "lstat", "access", "chdir",
     "symlink", "utime", "copy", "copy2", "copyfile", "copytree", "disk_usage", "unpack_archive",
     "make_archive", "getenv"}
)  # fmt: skip
"""What they do in a directory, or with its name, leaves it to whoever made it."""

PAIRING = frozenset({"zip", "enumerate", "zip_longest"})
CHAINING = frozenset({"chain", "from_iterable", "gather", "wait", "map", "starmap"})
PASSED_ON = frozenset({"wrap_socket", "run_until_complete"})
"""Functions, and methods of whatever object, whose result stands for what they are given: the socket under
its encryption, what a coroutine returns."""

PASSED_AS = frozenset({0, "sock"})
RUNNING_IN: Mapping[str, frozenset[Position]] = {
    "set_event_loop": frozenset({0, "loop"}),
    "run_coroutine_threadsafe": frozenset({1, "loop"}),
}
"""Functions of asyncio that are told which loop it is about, by the argument that is the loop. A loop that
only a local name has is left to the thread for which it is set."""

SERVING = frozenset({"server", "make_server"})
"""Functions of libraries that make a server, which works with what they are given as long as it runs."""

GIVING_BACK = PUTTING | {"finalize", "register", "closing_later", "addCleanup", "addfinalizer"}
INTO_ORDER = frozenset({"heappush", "insort", "insort_left", "insort_right"})
EXCHANGING = frozenset({"heappushpop", "heapreplace"})
APPENDING = frozenset({"append", "appendleft", "add", "put", "put_nowait", "push", "insert", "setdefault"})
EXTENDING = frozenset({"extend", "extendleft", "update", "union"})
WATCHER = re.compile(r"poll|selector|epoll|kqueue")
"""What waits for events on descriptors that it does not own."""

STANDARD_STREAMS = frozenset({"stdin", "stdout", "stderr"})
SPAWNING = re.compile(r"popen|spawn|subprocess|^(?:run|call|check_call|check_output)$", re.IGNORECASE)
"""A child gets a copy of the descriptor: the parent's stays his to close."""

KEYWORDS_TAKEN = frozenset({"sock", "sockets", "_sock"})
"""Arguments by which servers and transports take a socket over: `create_server(factory, sock=sock)`."""

THROUGH: Mapping[str, frozenset[Position]] = {
    "zipfile.ZipFile": frozenset({0, "file"}),
    "gzip.GzipFile": frozenset({3, "fileobj"}),
    "gzip.open": frozenset({0, "filename"}),
    "bz2.open": frozenset({0, "filename"}),
    "bz2.BZ2File": frozenset({0, "filename"}),
    "lzma.open": frozenset({0, "filename"}),
    "lzma.LZMAFile": frozenset({0, "filename"}),
    "tarfile.open": frozenset({2, "fileobj"}),
    "tarfile.TarFile": frozenset({2, "fileobj"}),
    "wave.open": frozenset({0, "f"}),
    "csv.reader": frozenset({0}),
    "csv.writer": frozenset({0}),
    "csv.DictReader": frozenset({0, "f"}),
    "csv.DictWriter": frozenset({0, "f"}),
    "pickle.Pickler": frozenset({0, "file"}),
    "pickle.Unpickler": frozenset({0, "file"}),
}
"""What Python's library makes over an open file, by the argument that is the file: closing it leaves that
open (documentation of each: "Calling close() does not close fileobj")."""

ASKING = frozenset({"__next__", "__anext__", "send", "asend"})
"""Methods by which a generator is asked for the next element."""

REPLACING = frozenset({"replace", "_replace", "evolve"})
"""Functions that make another record of one, with other fields: of dataclasses, named tuples, attrs."""

KEYED = frozenset({"pop", "get", "setdefault", "__getitem__"})
"""Methods of a dict that are about one key."""

TAKING_OUT = frozenset({"pop", "popleft", "popitem", "get_nowait", "popright"})


def container_method(call: Call, position: Position, rest: Path) -> Treatment | None:
    """A method of the container in which the lease lies at `rest`."""
    name = call.method
    if position != -1 or not rest or call.receiver is None:
        return None
    if not rest[0].startswith("["):
        return None
    inner = rest[1:]
    if name in KEYED and _another_key(call, rest[0]):
        return BORROWED
    if name in TAKING_OUT or (name == "get" and _of_a_queue(call.at)):
        result = (ANY_ITEM, *inner) if name == "popitem" else inner
        return Treatment(result=result, leaves=True)
    if name == "clear":
        return Treatment(leaves=True)
    if rest[0] == TO_COME and name in ASKING:
        return Treatment(result=inner)
    if name in ("get", "setdefault", "__getitem__"):
        return Treatment(result=inner)
    if name == "items":
        return Treatment(result=(ANY_ITEM, "[1]", *inner))
    if name in ("values", "copy", "queue"):
        return Treatment(result=(ANY_ITEM, *inner))
    if name in ("keys", "index", "count", "sort", "reverse", "remove", "discard"):
        return BORROWED
    return None


def empties(call: Call) -> bool:
    return call.method == "clear" and not call.at.args and not call.at.keywords


def _of_a_queue(call: ast.Call) -> bool:
    """`queue.get()`, `queue.get(timeout=1)`, `queue.get(False)`: no key."""
    first = call.args[0] if call.args else ast.Constant(value=True)
    return isinstance(first, ast.Constant) and isinstance(first.value, bool)


def _another_key(call: Call, item: str) -> bool:
    """`options.pop("name")` takes nothing from under "folder"; of `options.pop(key)` nobody can tell."""
    if not item.startswith(("['", '["')) or not call.at.args:
        return False
    key = call.at.args[0]
    return not isinstance(key, ast.Constant) or f"[{key.value!r}]" != item


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


def made_anew(call: Call, position: Position, rest: Path) -> Treatment | None:
    """`replace(record, pages=pages)`, `record._replace(pages=pages)`: what the new record has of the old one,
    and what it is told; `SimpleNamespace(pages=pages)` has nothing else."""
    if call.method == "SimpleNamespace" and isinstance(position, str):
        return Treatment(result=(f".{position}", *rest))
    if call.method not in REPLACING or not call.at.keywords:
        return None
    if isinstance(position, str):
        return Treatment(result=(f".{position}", *rest))
    told = {f".{keyword.arg}" for keyword in call.at.keywords}
    of_the_old = position == (-1 if call.method == "_replace" else 0) and rest[:1]
    if not of_the_old or not rest[0].startswith("."):
        return None
    return BORROWED if rest[0] in told else Treatment(result=rest)


def heap(call: Call, position: Position, rest: Path, *, answered: bool = False) -> Treatment | None:
    """`heappush(self.waiting, (due, lease))`, `heappop(self.waiting)`, `insort(slots, lease)`: the list. So
    has it what comes in by `last = heappushpop(heap, lease)`, where somebody asks for what is `answered`, and
    what comes out by that is in his hands."""
    exchanging = EXCHANGING if answered else frozenset()
    entering, leaving = INTO_ORDER | exchanging, exchanging | {"heappop"}
    if not call.args or call.method not in entering | leaving:
        return None
    if call.method in entering and position == 1:
        into = call.args[0][0]
        return TAKEN if is_temporary(into) else Treatment(moved_to=(*into, ANY_ITEM, *rest))
    if call.method in leaving and position == 0 and rest and rest[0].startswith("["):
        return Treatment(result=rest[1:], leaves=True)
    return BORROWED


def through(dotted: str, position: Position, rest: Path) -> Treatment | None:
    """An archive or a reader over a file that was opened for it."""
    over = not rest and position in THROUGH.get(dotted, ())
    return Treatment(result=(OVER,)) if over else None


def default(call: Call, position: Position, rest: Path) -> Treatment | None:
    """`cache.get(key, pool.allocate())`: where the key is there, nobody gets what was made in vain. So of
    `setdefault`, which keeps it where it is not; a name for it may still be asked whether it was kept."""
    if call.receiver is None or len(call.args) != 2 or position != 1:
        return None
    if call.method == "setdefault" and len(call.args[1][0]) == 1 and not is_temporary(call.receiver):
        return Treatment(result=rest, moved_to=(*call.receiver, ANY_ITEM, *rest), split=True)
    return Treatment(result=(), split=True) if call.method in ("get", "pop") and not rest else None


def of_paths(dotted: str, position: Position, rest: Path) -> Treatment | None:
    """What os, shutil and pathlib do to a path; what is renamed belongs to whoever knows the new name."""
    module, _, name = dotted.rpartition(".")
    if (module in ("os.path", "posixpath") and name not in SAME_PATH) or (
        module in FILES and name in LOOKING
    ):
        return BORROWED
    if position != 0 or module not in ("os", "os.path", "posixpath", "shutil", "pathlib"):
        return None
    if name in RENAMING:
        return TAKEN
    return Treatment(result=rest) if name in SAME_PATH else None


def _is_a_call(given: list[ast.expr]) -> bool:
    """`int(pool.alloc())`: nobody else has it."""
    return bool(given) and isinstance(given[0], ast.Call)


def function(call: Call, position: Position, rest: Path) -> Treatment | None:
    """A builtin or well-known function, by its last name."""
    name = call.method
    joins = name in CHAINING or (name == "sum" and any(isinstance(a, ast.List) for a in call.at.args[1:]))
    if name in BORROWING and not joins:
        return BORROWED
    if name in COPIES and position != 0:
        return BORROWED  # `copy(source, target)` is no copy module's
    sampled = name == "sample" and call.receiver == ("@random",)
    if (name in SAME_CONTENT or sampled) and position != -1:
        asked = rest[:1] == (TO_COME,) and name not in ON_DEMAND
        return Treatment(result=(ANY_ITEM, *rest[1:]) if asked else rest)
    if (name in ADDRESSES or (name == "int" and _is_a_call(call.at.args))) and position == 0 and not rest:
        return Treatment(result=())
    if name == "int":
        return BORROWED
    if name in PAIRING and position != -1:
        inner = rest[1:] if rest and rest[0].startswith("[") else rest
        index = f"[{position}]" if name != "enumerate" else "[1]"
        if isinstance(position, int) and position < len(call.args) and call.args[position][1]:
            return Treatment(result=(ANY_ITEM, ANY_ITEM, *rest[1:]))  # zip(*rows)
        return Treatment(result=(_each(rest), index, *inner))
    if joins and position != -1:
        return Treatment(result=(_each(rest), *(rest[1:] if rest and rest[0].startswith("[") else rest)))
    if name in PASSED_ON and position in PASSED_AS:
        return Treatment(result=rest)
    if position in RUNNING_IN.get(name, ()) and _is_a_field(call, position):
        return BORROWED
    if name in SERVING and position != -1:
        return Treatment(result=(ANY_ITEM, *rest))
    if name in ("next", "anext") and position == 0:
        return Treatment(result=rest[1:])
    if name == "getattr" and position == 0:
        return Treatment(result=(), maybe=True)
    if name == "memoryview" and position == 0:
        return Treatment(result=rest)
    if name in GIVING_BACK and position != -1:
        return RELEASED if name != "register" or not _is_watched(call, position) else _watched(call)
    if name in ("partial",) and position != -1:
        return Treatment(result=("<partial>", *rest))
    if name == "dict" and position != -1:
        return Treatment(result=(f"[{position!r}]" if isinstance(position, str) else ANY_ITEM, *rest))
    if name in ("create_task", "ensure_future") and position == 0:
        return TAKEN
    return None


def _each(rest: Path) -> str:
    """`zip(names, frames(pool))` asks a generator for one after the other."""
    return TO_COME if rest[:1] == (TO_COME,) else ANY_ITEM


def _is_a_field(call: Call, position: Position) -> bool:
    given = next((path for where, path in operands(call) if where == position), None)
    return given is not None and len(given) > 1


def given_to_a_child(call: Call, position: Position) -> bool:
    """`popen(command, stdin=file)`."""
    return position in STANDARD_STREAMS and SPAWNING.search(call.method) is not None


def _watched(call: Call) -> Treatment:
    """What was opened for the watcher only, `selector.register(os.fdopen(fd))`, is found in it again."""
    return TAKEN if call.args and is_temporary(call.args[0][0]) else BORROWED


def _is_watched(call: Call, position: Position) -> bool:
    """`selector.register(sock, events)` looks at the socket; `atexit.register(free, lease)` ends it."""
    root = call.receiver[-1].lstrip(".@_").lower() if call.receiver is not None else ""
    return position == 0 and WATCHER.search(root) is not None


__all__ = ["SAME", "container_method", "function", "stored_by_method"]
