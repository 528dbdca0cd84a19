"""Draws small loop-free programs about leases, as source text that can be both analysed and executed."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from hypothesis import strategies as st

NAMES = ("a", "b", "c")
PAIRS = ("p", "q")
FLAGS = ("c0", "c1", "c2")
HEADER = "def target(pool, holder, sink, work, probe, c0, c1, c2):"
_ACQUIRE = re.compile(r"pool\.acquire\((\d+)\)")
_RETURN = re.compile(r"return (.+)")
_ASSERT = re.compile(r"assert (c\d)")
_HANDLERS = (
    "except ValueError:",
    "except KeyError:",
    "except Exception:",
    "except BaseException:",
    "except:",
)

Defined = frozenset[str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Program:
    """`lines` are what is analysed; `traced` says when it reaches a handler, a finally, a bare raise."""

    lines: tuple[str, ...]
    traced: tuple[str, ...]
    sites: dict[int, tuple[int, int]]  # acquire site -> line and column

    @property
    def source(self) -> str:
        return "\n".join(self.lines) + "\n"


def program(body: str) -> Program:
    """A program written by hand: its body; `#reached` and `#raising` are for the traced text only."""
    traced = [HEADER, *("    " + line for line in body.strip("\n").splitlines())]
    return _finished(traced)


def _finished(marked: list[str]) -> Program:
    lines = tuple(line for line in marked if "#" not in line)
    traced = tuple(_traced(line) for line in marked)
    sites = {
        int(call[1]): (number, call.start() + 1)
        for number, line in enumerate(lines, 1)
        for call in _ACQUIRE.finditer(line)
    }
    return Program(lines, traced, sites)


def _traced(line: str) -> str:
    line = line.replace("#reached", "reached()").replace("#raising", "raising()")
    line = line.replace("raise ValueError", "raise unwind(ValueError)")
    line = _RETURN.sub(r"return returned((\1))", line)
    return _ASSERT.sub(r"assert \1 or unwind()", line)


@dataclass(slots=True)
class _Writer:
    """Draws statements; `defined` names are bound on every way to where we are, so reading them is safe."""

    draw: Callable[..., Any]
    marked: list[str] = field(default_factory=lambda: [HEADER])
    sites: int = 0
    calls: int = 0
    stores: int = 0
    left: int = 14

    def pick(self, options: Iterable[T]) -> T:
        return cast(T, self.draw(st.sampled_from(tuple(options))))

    def emit(self, depth: int, text: str) -> None:
        self.marked.append("    " * depth + text)

    def acquire(self) -> str:
        self.sites += 1
        return f"pool.acquire({self.sites})"

    def block(self, depth: int, defined: Defined, handler: bool = False) -> Defined | None:
        """Emits one block; None says that its end cannot be reached."""
        for _ in range(self.draw(st.integers(1, 4))):
            self.left -= 1
            after = self.statement(depth, defined, handler)
            if after is None:
                return None
            defined = after
            if self.left <= 0:
                break
        return defined

    def statement(self, depth: int, defined: Defined, handler: bool) -> Defined | None:
        kinds = [self.simple, self.simple, self.simple, self.simple, self.leave]
        if depth < 4 and self.left > 0:
            kinds += [self.branch, self.branch, self.attempt, self.attempt, self.lease]
        return self.pick(kinds)(depth, defined, handler)

    def simple(self, depth: int, defined: Defined, handler: bool) -> Defined:
        held = [name for name in NAMES if name in defined]
        pairs = [name for name in PAIRS if name in defined]
        kinds = [self.take, self.call, self.flag]
        if self.sites >= 3:
            kinds = kinds[1:]
        if held:
            kinds += [self.give, self.give, self.give, self.move, self.forget, self.store]
        if pairs:
            kinds += [self.unpack]
        return self.pick(kinds)(depth, defined)

    def take(self, depth: int, defined: Defined) -> Defined:
        name = self.pick(NAMES)
        form = self.pick(("plain",) * 6 + ("maybe", "maybe", "pair", "discard", "inside"))
        if form == "discard":
            self.emit(depth, self.acquire())
            return defined
        if form == "inside":
            self.emit(depth, f"work({self.acquire()})")
            return defined
        if form == "pair":
            pair = self.pick(PAIRS)
            self.emit(depth, f"{pair} = ({self.acquire()}, {self.acquire()})")
            return defined | {pair}
        if form == "maybe":
            self.emit(depth, f"{name} = {self.acquire()} if {self.condition(defined)} else None")
        else:
            self.emit(depth, f"{name} = {self.acquire()}")
        return defined | {name}

    def call(self, depth: int, defined: Defined) -> Defined:
        if self.calls < 3:
            self.calls += 1
            held = [name for name in NAMES if name in defined]
            self.emit(depth, f"work({self.pick(['', *held])})")
        else:
            self.emit(depth, "pass")
        return defined

    def flag(self, depth: int, defined: Defined) -> Defined:
        name = self.pick(("d0", "d1"))
        self.emit(depth, f"{name} = {self.pick(('True', 'False'))}")
        return defined | {name}

    def give(self, depth: int, defined: Defined) -> Defined:
        name = self.pick([n for n in NAMES if n in defined])
        guard = self.pick(
            ("", "", f"if {name} is not None:", f"if {name}:", f"if {self.condition(defined)}:")
        )
        if guard:
            self.emit(depth, guard)
            depth += 1
        self.emit(depth, f"pool.release({name})")
        return defined

    def move(self, depth: int, defined: Defined) -> Defined:
        held = [n for n in NAMES if n in defined]
        source, target = self.pick(held), self.pick(NAMES)
        if self.draw(st.booleans()):
            self.emit(depth, f"{target} = {source}")
            return defined | {target}
        pair = self.pick(PAIRS)
        self.emit(depth, f"{pair} = ({source}, {self.pick(held)})")
        return defined | {pair}

    def forget(self, depth: int, defined: Defined) -> Defined:
        name = self.pick([n for n in NAMES if n in defined])
        if self.draw(st.booleans()):
            self.emit(depth, f"{name} = None")
            return defined
        self.emit(depth, f"del {name}")
        return defined - {name}

    def store(self, depth: int, defined: Defined) -> Defined:
        self.stores += 1
        name = self.pick([n for n in NAMES if n in defined])
        forms = (
            f"holder.f{self.stores} = {name}",
            f"sink.append({name})",
            f"holder.f{self.stores} = [{name}]",
        )
        self.emit(depth, self.pick(forms))
        return defined

    def unpack(self, depth: int, defined: Defined) -> Defined:
        pair = self.pick([name for name in PAIRS if name in defined])
        left, right = self.pick((("a", "b"), ("b", "c"), ("c", "a")))
        if self.draw(st.booleans()):
            self.emit(depth, f"{left}, {right} = {pair}")
            return defined | {left, right}
        self.emit(depth, f"{left} = {pair}[{self.pick((0, 1))}]")
        return defined | {left}

    def leave(self, depth: int, defined: Defined, handler: bool) -> Defined | None:
        held = [name for name in NAMES if name in defined]
        pairs = [name for name in PAIRS if name in defined]
        forms = ["return", "raise ValueError", "assert"]
        forms += ["raise", "raise"] if handler else []
        forms += ["name", "both", "maybe"] if held else []
        forms += ["pair"] if pairs else []
        form = self.pick(forms)
        if form == "assert":
            self.emit(depth, f"assert {self.pick(FLAGS)}")
            return defined
        text = {
            "name": lambda: f"return {self.pick(held)}",
            "both": lambda: f"return {self.pick(held)}, {self.pick(held)}",
            "maybe": lambda: f"return {self.pick(held)} if {self.condition(defined)} else None",
            "pair": lambda: f"return {self.pick(pairs)}",
        }.get(form, lambda: form)()
        if form == "raise":
            self.emit(depth, "#raising")
        self.emit(depth, text)
        return None

    def condition(self, defined: Defined) -> str:
        held = [n for n in NAMES if n in defined]
        forms = ["flag", "flag", "not", "and", "or"] + (["none", "held"] if held else [])
        forms += ["own"] if defined & {"d0", "d1"} else []
        left, right = self.pick(FLAGS), self.pick(FLAGS)
        match self.pick(forms):
            case "flag":
                return left
            case "not":
                return f"not {left}"
            case "and":
                return f"{left} and {right}"
            case "or":
                return f"{left} or {right}"
            case "none":
                return f"{self.pick(held)} is None"
            case "held":
                return f"{self.pick(held)} is not None"
        return self.pick(sorted(defined & {"d0", "d1"}))

    def branch(self, depth: int, defined: Defined, handler: bool) -> Defined | None:
        inside = defined
        if self.sites < 3 and self.draw(st.integers(0, 5)) == 0:
            name = self.pick(NAMES)
            self.emit(depth, f"if ({name} := {self.acquire()}) is {self.pick(('', 'not '))}None:")
            inside = defined = defined | {name}
        elif self.calls < 3 and self.draw(st.integers(0, 4)) == 0:
            self.calls += 1
            self.emit(depth, "if probe():")
        else:
            self.emit(depth, f"if {self.condition(defined)}:")
        then = self.block(depth + 1, inside, handler)
        otherwise: Defined | None = defined
        if self.draw(st.booleans()):
            self.emit(depth, "else:")
            otherwise = self.block(depth + 1, inside, handler)
        return _joined(then, otherwise)

    def lease(self, depth: int, defined: Defined, handler: bool) -> Defined | None:
        self.emit(depth, "with pool.lease(8):")
        return self.block(depth + 1, defined, handler)

    def attempt(self, depth: int, defined: Defined, handler: bool) -> Defined | None:
        self.emit(depth, "try:")
        body = self.block(depth + 1, defined, handler)
        kept = _kept(defined, self.marked)
        handled: Defined | None = None
        caught = self.draw(st.integers(0, 3)) > 0
        if caught:
            self.emit(depth, self.pick(_HANDLERS))
            self.emit(depth + 1, "#reached")
            handled = self.block(depth + 1, kept, True)
            if self.draw(st.integers(0, 3)) == 0:
                self.emit(depth, "else:")
                body = self.block(depth + 1, body if body is not None else kept, handler)
        joined = _joined(handled, body)
        if caught and self.draw(st.booleans()):
            return joined
        self.emit(depth, "finally:")
        self.emit(depth + 1, "#reached")
        last = self.block(depth + 1, _kept(defined, self.marked))
        if last is None or joined is None:
            return None
        return _kept(joined, self.marked) | last


def _joined(left: Defined | None, right: Defined | None) -> Defined | None:
    if left is None or right is None:
        return right if left is None else left
    return left & right


def _kept(defined: Defined, marked: list[str]) -> Defined:
    """Without the names that some `del` may have taken: where it stands does not matter, we stay safe."""
    gone = {line.strip()[4:] for line in marked if line.strip().startswith("del ")}
    return defined - gone


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    """Programs with one to three acquires, at least one; most also release or hand over."""
    writer = _Writer(draw)
    start = frozenset(draw(st.sets(st.sampled_from(NAMES))))
    for name in sorted(start):
        writer.emit(1, f"{name} = None")
    defined: Defined | None = writer.take(1, start) if draw(st.booleans()) else start
    while writer.left > 0 and defined is not None:
        defined = writer.block(1, defined)
    return _finished(writer.marked)
