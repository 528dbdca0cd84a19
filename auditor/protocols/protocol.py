"""What a protocol is: the calls that acquire, release, lend and take over, as patterns over dotted names."""

import re
from dataclasses import dataclass, field
from fnmatch import translate

from auditor.config import ProtocolSettings
from auditor.flow.effects import Handle, Position, Value


class BadPattern(ValueError):
    """A protocol's pattern that cannot be understood; the message says how to write it."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One line of a protocol. `operands` are argument positions or names; `on_lease` is `$.method()`."""

    text: str
    name: re.Pattern[str]
    operands: tuple[Position, ...]
    on_lease: bool = False
    explicit: bool = False

    @property
    def last_word(self) -> str:
        """`free` of `*.free(0)`."""
        return _last_word(self.text)

    def matches(self, dotted: str | None, source: str) -> bool:
        """Against the resolved dotted name where it is known, and against the source text."""
        return (dotted is not None and self.name.fullmatch(dotted) is not None) or (
            self.name.fullmatch(source) is not None
        )


def parse_pattern(text: str, default: tuple[Position, ...]) -> Pattern:
    """`*.free(0)`, `*.release(blocks)`, `$.close()`, `open`."""
    match = re.fullmatch(r"\s*(\$\.)?([^()\s]+)\s*(?:\(([^()]*)\))?\s*", text)
    if match is None:
        raise BadPattern(f"pattern {text!r}: write a dotted name, with (0) or (name) for what is given back")
    on_lease, name, arguments = match.groups()
    operands = (
        default
        if arguments is None
        else tuple(_operand(part, text) for part in arguments.split(",") if part.strip())
    )
    if on_lease:
        if operands and arguments is not None:
            raise BadPattern(f"pattern {text!r}: $ is the lease itself and is what is given back; write ()")
        operands = (-1,)
    return Pattern(text, re.compile(translate(name)), operands, bool(on_lease), arguments is not None)


def _beginning(text: str) -> Pattern:
    """`*.allocate`, whose `handle` says what of the call carries the obligation."""
    pattern = parse_pattern(text, ())
    if pattern.on_lease:
        nothing = "$ is a lease, and there is none before this call; write a dotted name"
        raise BadPattern(f"pattern {text!r}: {nothing}")
    if pattern.operands:
        raise BadPattern(f"pattern {text!r}: what an acquire fills is said by `handle`, not in parentheses")
    return pattern


def _operand(part: str, text: str) -> Position:
    part = part.strip()
    if part.isdigit():
        return int(part)
    if part.isidentifier():
        return part
    raise BadPattern(f"pattern {text!r}: {part!r} is neither an argument's number nor its name")


@dataclass(frozen=True, slots=True)
class Protocol:
    name: str
    origin: str  # settings, discovered, built-in
    acquire: tuple[Pattern, ...] = ()
    release: tuple[Pattern, ...] = ()
    lease: tuple[Pattern, ...] = ()
    transfer: tuple[Pattern, ...] = ()
    handle: Handle = Handle.RESULT
    argument: Position = 0
    value: Value = Value.OBJECT
    words: frozenset[str] = field(default_factory=frozenset)


def protocol_from_settings(settings: ProtocolSettings, origin: str = "settings") -> Protocol:
    """Raises BadPattern, or ValueError naming the key that is wrong."""
    handle, argument = _handle(settings.handle)
    given_back: tuple[Position, ...] = (0,) if handle in (Handle.RESULT, Handle.ARGUMENT) else ()
    acquire = tuple(map(_beginning, settings.acquire))
    release = tuple(parse_pattern(text, given_back) for text in settings.release)
    return Protocol(
        name=settings.name,
        origin=origin,
        acquire=acquire,
        release=release,
        lease=tuple(map(_beginning, settings.lease)),
        transfer=tuple(parse_pattern(text, (0,)) for text in settings.transfer),
        handle=handle,
        argument=argument,
        value=_value(settings.value),
        words=frozenset(_last_word(text) for text in (*settings.acquire, *settings.lease, *settings.release)),
    )


def _handle(text: str) -> tuple[Handle, Position]:
    kind, _, which = text.partition(" ")
    which = which.strip()
    if kind == "argument" and (which.isdigit() or which.isidentifier() or not which):
        return Handle.ARGUMENT, int(which) if which.isdigit() else which or 0
    if which or kind not in {each.value for each in Handle}:
        raise ValueError(f"handle {text!r}: use result, receiver, argument N, argument NAME or none")
    return Handle(kind), 0


def _value(text: str) -> Value:
    try:
        return {each.value: each for each in Value if each is not Value.AMOUNT}[text]
    except KeyError:
        raise ValueError(f"value {text!r}: use tensor, object or index") from None


def _last_word(pattern: str) -> str:
    """The literal end of a pattern, by which files are pre-filtered."""
    name = pattern.partition("(")[0].rpartition(".")[2].strip()
    return max(re.split(r"[*?\[\]]", name), key=len)
