"""Access paths against each other: what names the lease, contains it, or is a part of it."""

import ast
import re
from collections.abc import Set

from auditor.flow.effects import Acquisition, Value
from auditor.ir.ops import ANY_ITEM, TO_COME, Call, Constant, Fresh, Op, Path, is_temporary
from auditor.protocols.vocabulary import LEASE_METHODS
from auditor.source.nodes import walk

VIEWS = frozenset({".T", ".mT", ".H", ".mH", ".data", ".real", ".imag", "._base"})
"""Attributes of a tensor that share its storage (torch.Tensor's documentation, "Tensor Attributes")."""


METADATA = frozenset({".shape", ".dtype", ".device", ".ndim", ".layout", ".size", ".is_cuda", ".itemsize",
                      ".nbytes",
                      ".requires_grad", ".numel"})  # fmt: skip


DESCRIPTIONS = frozenset({".headers", ".status", ".status_code", ".reason", ".code", ".url", ".encoding",
                          ".mode", ".closed", ".msg", ".rowcount", ".lastrowid", ".description", ".arraysize",
                          ".returncode", ".width", ".height", ".format",
                          ".dim", ".pts", ".dts", ".score", ".scale", ".priority", ".capacity",
                          ".length", ".timestamp", ".deadline", ".loss", ".num_tokens", ".n_tokens",
                          ".valid"})  # fmt: skip
"""Attributes of a file, a response, a cursor, a process, an image or a buffer that tell about it: whoever has
them has not the file."""


FARTHER = frozenset({".rank", ".payload", ".body"})
"""What lies two fields deep and is no number to find anything by: `lease.adapter.rank`, not
`req.kv.pool_idx`."""

MEMORY = frozenset({".data", ".tensor", ".buf", ".buffer", ".mem", ".memory", ".view", ".storage", ".kv"})
"""Fields of an object that is handed out which hold what the user writes to, and no numbers."""

OWN_ENDS = frozenset({f".{name}" for name in LEASE_METHODS | {"aclose", "put_back", "drop"}})
"""Methods of a lease, or of what it lies in, that end it. No tensor has them: `stack.callback(lease.release)`
says that what is called a tensor pool lends something else."""

NUMBERS = re.compile(r"(?:^\.|_)(?:ids?|idxs?|index|indexes|indices|numbers?|blocks?|pages?|slots?|rows?)$")
"""Fields of an object that stands for numbers: `group.page_ids`."""


GIVEN: Path = ("<given>",)
"""The caller's own name for what he gives, which no binding of the callee changes."""

SEVERAL = frozenset({ANY_ITEM, "[:]", TO_COME})


def matches(component: str, other: str) -> bool:
    """`[*]` stands for any item."""
    if component == other:
        return True
    return component.startswith("[") and other.startswith("[") and bool({component, other} & SEVERAL)


def begins_with(path: Path, prefix: Path) -> bool:
    if len(path) < len(prefix) or path[0] != prefix[0]:
        return False
    return all(matches(a, b) for a, b in zip(path[1:], prefix[1:], strict=False))


def begins_exactly(target: Path, place: Path) -> bool:
    """Whether writing to `target` ends what is at `place`; `[*]` is not any one item here."""
    return place[: len(target)] == target


def below(place: Path, operand: Path) -> Path | None:
    """Where inside `operand` the lease at `place` is found: `()` for the operand itself, None if it is
    not."""
    operand = _unsliced(operand)
    return place[len(operand) :] if begins_with(place, operand) else None


def part(place: Path, operand: Path, acquisition: Acquisition) -> str | None:
    """`same` or `maybe` where `operand` is a piece of the lease at `place`, None where it is not."""
    operand = _unsliced(operand)
    if len(operand) <= len(place) or not begins_with(operand, place):
        return None
    rest = operand[len(place) :]
    if not METADATA.isdisjoint(rest):
        return None
    if rest == (".obj",):
        return "same"  # what a memoryview shows
    value = acquisition.value
    if value is Value.TENSOR and rest[0] in OWN_ENDS:
        return "maybe"
    if value is Value.TENSOR:
        return "same" if all(piece.startswith("[") or piece in VIEWS for piece in rest) else None
    if not DESCRIPTIONS.isdisjoint(rest) or rest[0] in acquisition.telling:
        return None
    if value is Value.OBJECT and not acquisition.declared and not FARTHER.isdisjoint(rest[1:]):
        return None
    numbers = value is Value.INDEX and rest[0].startswith(".") and NUMBERS.search(rest[0]) is not None
    return "same" if all(piece.startswith("[") for piece in rest[numbers:]) else "maybe"


def joined(op: Fresh, places: frozenset[Path]) -> frozenset[Path]:
    """`self.running + self.waiting` holds what lies in either list."""
    if not isinstance(op.at, ast.BinOp) or not isinstance(op.at.op, ast.Add):
        return frozenset()
    inside = (below(place, use) for use in op.uses for place in places)
    return frozenset((*op.target, ANY_ITEM, *rest[1:]) for rest in inside if rest and rest[0].startswith("["))


def together(results: list[Path]) -> Path:
    """Where in a result the lease lies. `return reader, writer`: the pair is the lease; but `.rows` of a
    named tuple and its `[0]` are one place."""
    spelt = {place[-1][0] for place in results if place}
    pair = len(results) > 1 and len({place[:-1] for place in results}) == len(spelt) == 1
    return results[0][:-1] if pair and not fields_beside(results) else results[0]


def fields_beside(results: list[Path]) -> frozenset[Path]:
    """`return Staged(buf, buf[:n])`: fields of one object of which each is or has the lease, without the
    first. `return source, off`: closures that end it, beside it."""
    fields = any(all(place and place[end][0] == "." for place in results) for end in (0, -1))
    beside = results if fields else [each for each in results if any(piece[0] == "<" for piece in each)]
    return frozenset(beside) - {results[0]}


def _unsliced(operand: Path) -> Path:
    """A slice of a list holds what the list holds."""
    return tuple(piece for piece in operand if piece != "[:]") if "[:]" in operand else operand


def escaped(path: Path, parameters: frozenset[str], fresh: Set[str]) -> bool:
    """Whether what is stored at `path` outlives the call: a global, or inside an object not made here."""
    root = path[0]
    if root[0] == "@":
        return True
    if len(path) == 1 or root[0] == "%" or "~" in root:
        return False
    if path[1].startswith("<") and root not in parameters:
        return False  # captured by a local closure
    return root in parameters or root not in fresh


def named(places: frozenset[Path]) -> bool:
    """Whether anything but an intermediate value holds it."""
    return any(not is_temporary(place) and "~" not in place[0] for place in places)


def reads(function: ast.AST, name: str) -> bool:
    """A lambda within a nested function names what the outermost one made."""
    return any(isinstance(node, ast.Name) and node.id == name for node in walk(function))


MEASURING = frozenset({"len", "int", "max", "min", "abs", "round"})


def spelled_out(op: Op) -> Path:
    """Where an amount lies that has no name but itself: `4`, `len(body)`, `2 * size`; () for what is none."""
    match op:
        case Constant(value=value):
            return (f"<{value!r}>",)
        case Fresh(at=ast.BinOp() as at):
            return (f"<{ast.unparse(at)}>",)
        case Call(at=ast.Call(func=ast.Name(id=name)) as at) if name in MEASURING:
            return (f"<{ast.unparse(at)}>",)
    return ()
