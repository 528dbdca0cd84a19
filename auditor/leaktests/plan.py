"""What a leak test needs to know: what to test, how to build it, what to feed it, what was left out."""

from collections.abc import Mapping

import msgspec

Shape = tuple[int, int]
"""How many sequences in a batch, and how many tokens in each: `b` and `n` in a plan's expressions."""


class Target(msgspec.Struct, frozen=True, order=True):
    """Something that can be run: `root` is the folder from which `module` is imported."""

    path: str
    line: int
    module: str
    name: str
    kind: str  # module | function | autograd | code: a function or `Class.method` that a finding is in
    root: str
    doc: str = ""

    @property
    def key(self) -> str:
        """As recipes name it: `package.module:Class`."""
        return f"{self.module}:{self.name}"


class Argument(msgspec.Struct, frozen=True):
    """A value as Python text, in which `b`, `n` and `device` stand for themselves."""

    name: str
    value: str
    positional: bool = False

    @property
    def text(self) -> str:
        """As it stands in a call."""
        return self.value if self.positional else f"{self.name}={self.value}"


class Variation(msgspec.Struct, frozen=True):
    """Other arguments than the plan's own, chosen because they take the path of one finding."""

    fingerprint: str
    code: str
    where: str
    message: str
    build: tuple[Argument, ...]
    feed: tuple[Argument, ...]
    shape: Shape
    scenario: str = "train"
    faults: str = ""  # where they are injected: operations; or refusals, at pools that may say no
    pools: tuple[str, ...] = ()  # names of the classes whose leases are counted
    imports: tuple[str, ...] = ()  # what brings those names
    then: tuple[str, ...] = ()  # methods that are called after it
    shown: bool = False  # whether it left a lease through the finding's line when it was tried


class Plan(msgspec.Struct, frozen=True):
    """How a target was built and fed when it ran."""

    target: Target
    build: tuple[Argument, ...]
    feed: tuple[Argument, ...]
    shapes: tuple[Shape, ...]
    scenarios: tuple[str, ...]
    differentiable: bool
    operations: int  # of a step at `fault_shape`, which has the fewest; 0: the target itself runs none
    fault_shape: int = 0  # an index into `shapes`
    left_out: tuple[tuple[str, str], ...] = ()  # scenarios that do not run, and why
    imports: tuple[str, ...] = ()
    switch: tuple[Argument, ...] = ()  # what turns its pool on
    pool_scenarios: tuple[str, ...] = ()  # those in which its pool lends
    pool_shape: int = 0  # an index into `shapes`: there it lends most
    method: str = ""  # called instead of the object itself
    origin: str = "signature"  # or recipe
    aimed: tuple[Variation, ...] = ()
    tried: int = 0
    seconds: float = 0.0


class Unplanned(msgspec.Struct, frozen=True):
    """A target that no plan was found for. `abstract`: there is nothing in it to run, so nobody need act."""

    target: Target
    reason: str
    tried: int = 0
    abstract: bool = False
    parts: bool = False  # it takes other modules: worth another try when more of those are known
    attempts: tuple[str, ...] = ()  # the likeliest calls and what each ended with
    build: tuple[Argument, ...] = ()  # the best that was tried, for a recipe to start from
    feed: tuple[Argument, ...] = ()


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person says of one target; every value is Python text (docs/leaktests.md)."""

    target: str
    build: Mapping[str, str] = {}
    feed: Mapping[str, str] = {}
    args: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    scenarios: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    method: str = ""
    skip: str = ""


class Aim(msgspec.Struct, frozen=True):
    """A leak finding, and the lines that lead to it."""

    fingerprint: str
    code: str
    location: str  # the file, as the system opens it
    acquire: int
    lines: tuple[int, ...]
    where: str
    message: str
    symbol: str = ""
    by_exception: bool = False


class Request(msgspec.Struct, frozen=True):
    """What a probing process is asked: the targets of one file, one after the other."""

    targets: tuple[Target, ...]
    recipes: Mapping[str, Recipe] = {}
    known: tuple[Plan, ...] = ()  # how classes that serve as arguments are built
    configs: tuple[str, ...] = ()  # `module:Class` of configuration classes
    aims: tuple[Aim, ...] = ()
    device: str = "cpu"
    seconds: float = 30.0


class Answer(msgspec.Struct, frozen=True):
    """One line from a probing process: a target begins, or it is done with."""

    begun: str = ""
    plan: Plan | None = None
    unplanned: Unplanned | None = None
    imported: float | None = None


class Replay(msgspec.Struct, frozen=True):
    """A process is asked for the results of plans, all of modules under one root, to be kept in `folder` or
    compared with those that are there."""

    plans: tuple[Plan, ...]
    root: str
    folder: str
    compares: bool = False
    device: str = "cpu"
    seconds: float = 60.0


class Replayed(msgspec.Struct, frozen=True):
    """One line of its answer: a plan begins (None), or what is different about its results."""

    number: int
    told: str | None = None
