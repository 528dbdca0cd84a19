"""Which `except` clause catches what is raised: surely, perhaps, or never."""

import builtins
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Raised:
    """What is raised, as far as the text tells: a class's name, or one of the kinds below.

    `again` is a bare `raise`: of the class that its handler names, or of one derived from it. `without` are
    classes it cannot be of, for a handler that names them would have caught it before."""

    name: str
    again: bool = False
    without: frozenset[str] = frozenset()

    def past(self, handler: "Handler") -> "Raised":
        """The same, once it is known that `handler` did not catch it."""
        return replace(self, without=self.without | frozenset(handler.names or ()))


CALL = Raised("call")  # whatever a call may raise
EXIT = Raised("exit")  # CancelledError, GeneratorExit: not an Exception
UNKNOWN = Raised("?")  # a raise of something computed
LOOKUPS = frozenset({"KeyError", "IndexError", "LookupError"})
"""What is raised where there is nothing under a key."""

ANYTHING = frozenset({CALL.name, UNKNOWN.name})


@dataclass(slots=True)
class Handler:
    """`entry` is where its body begins; `names` the exceptions it lists, None for a bare except."""

    entry: int
    names: tuple[str, ...] | None

    def catches(self, raised: Raised) -> bool | None:
        """True: surely; None: perhaps; False: never."""
        if self.names is None or "BaseException" in self.names:
            return True
        if raised.name == EXIT.name:
            return bool({"CancelledError", "GeneratorExit"} & set(self.names))
        if "Exception" in self.names:
            return True
        left = [name for name in self.names if not _among(name, raised.without)]
        if raised.name in ANYTHING:
            return None if left else False
        return _catches_class(left, raised)

    def raises_again(self, earlier: list["Handler"]) -> Raised:
        """What a bare `raise` in its body raises; the handlers above it have let it pass."""
        raised = Raised(self.names[0], again=True) if self.names and len(self.names) == 1 else UNKNOWN
        for handler in earlier:
            raised = raised.past(handler)
        return raised


def _catches_class(names: list[str], raised: Raised) -> bool | None:
    kind = getattr(builtins, raised.name, None)
    known = [getattr(builtins, name, None) for name in names]
    if raised.name in names or any(_derives(kind, base) for base in known):
        return True
    if raised.again and any(_derives(base, kind) for base in known):
        return None
    return False if isinstance(kind, type) and all(isinstance(base, type) for base in known) else None


def _among(name: str, excluded: frozenset[str]) -> bool:
    """Whether every exception of that class is one of the excluded ones."""
    kind = getattr(builtins, name, None)
    return name in excluded or any(_derives(kind, getattr(builtins, other, None)) for other in excluded)


def _derives(kind: object, base: object) -> bool:
    return isinstance(kind, type) and isinstance(base, type) and issubclass(kind, base)
