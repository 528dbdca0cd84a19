"""The fault pass: a failure at every operation, and at every acquire; afterwards nothing may stay held.

A step is run once to count, then once for each place with a failure there. When all have been tried and a
step went well again, exactly as much must be alive as before the first failure. It is quadratic, so steps
are small here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .births import Births
from .culprits import fault_head, fault_report
from .errors import InjectedFault, Leak
from .leases import Counter, lease_report
from .ledger import Ledger, Level
from .pools import counter_watched

Step = Callable[[], object]
MOST_PLACES = 400


class _Countdown:
    """Lets so many calls pass and fails at the next; without a number it only counts."""

    def __init__(self) -> None:
        self.passed = 0
        self.fails_at: int | None = None
        self.failed_in = ""

    def arm(self, place: int | None) -> None:
        self.passed, self.fails_at, self.failed_in = 0, place, ""

    def tick(self, what: object) -> None:
        self.passed += 1
        if self.passed == self.fails_at:
            self.failed_in = str(what)
            raise InjectedFault(f"injected at call {self.passed}, in the place of {what}")


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, countdown: _Countdown) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._countdown = countdown

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in births.Watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._countdown.tick(func)
        return func(*args, **(kwargs or {}))


def count_places(step: Step, *, at: str = "operations", pools: tuple[Any, ...] = ()) -> int:
    """How many faults `inject_faults` would inject: the operations, or the acquires, of one step."""
    countdown = _Countdown()
    with _Operations(countdown) if at == "operations" else _failing_acquires(countdown, at, pools):
        step()
    return countdown.passed


def inject_faults(
    step: Step,
    *,
    at: str = "operations",
    pools: tuple[Any, ...] = (),
    most: int = MOST_PLACES,
    warmup: int = 3,
    last: int | None = None,
    named: bool = True,
    line: str = "",
) -> int:
    """Fail at the k-th operation (or the k-th acquire of `pools`), for every k; returns how many faults that
    were. For a twin whose leak is known, `last=1` fails at the last one only, and `named=False` spares the
    search for who holds the memory.

    The step may let the failure through or deal with it. Raises `Leak` if memory or a lease stays held, and
    ValueError if a step has more than `most` places. If memory stays, all are tried a second time to see
    where it is made. With `line` (`folder/file.py:12`) nothing counts but leases borrowed through that line.
    """
    attempt = _Attempt(step, at, pools, most, last, line)
    before, after, names, _ = attempt.run(warmup)
    if line and pools:
        return len(names)
    if after.storages > before.storages or after.bytes > before.bytes:
        head = fault_head(len(names), before, after)
        raise attempt.named(head) if named else Leak(head)
    return len(names)


@dataclass(frozen=True)
class _Attempt:
    """All faults in turn."""

    step: Step
    at: str
    pools: tuple[Any, ...]
    most: int
    last: int | None
    line: str

    def run(self, warmup: int, *, placed: bool = False) -> tuple[Level, Level, dict[int, str], Births]:
        """What was alive before and after, and in which operation's place each fault was."""
        countdown, ledger, counter = _Countdown(), Ledger(), Counter(self.line)
        with ExitStack() as exits:
            if self.pools:
                exits.enter_context(counter_watched(self.pools, counter.called))
            exits.enter_context(ledger)
            for _ in range(warmup):
                self.step()
            places = self._count()
            self.step()
            before, leases = ledger.take_stock(), len(counter.standing())
            ledger.births.placed = placed
            if self.at == "operations":
                ledger.watch.before = countdown.tick  # a second mode on top would double the cost of the pass
            else:
                exits.enter_context(_failing_acquires(countdown, self.at, self.pools))
            names = {}
            for place in range(1 if self.last is None else places + 1 - self.last, places + 1):
                names[place] = _fail_once(self.step, countdown, ledger.births, place, counter, leases)
            ledger.births.turn = 0
            countdown.arm(None)
            self.step()
            return before, ledger.take_stock(), names, ledger.births

    def _count(self) -> int:
        places = count_places(self.step, at=self.at, pools=self.pools)
        if places > self.most:
            raise ValueError(
                f"a step has {places} {self.at}, the fault pass takes {self.most} (it is quadratic): feed it "
                "smaller shapes and fewer layers, or pass most="
            )
        return places

    def named(self, head: str) -> Leak:
        """The failure, with the lines that made what stayed."""
        before, after, names, births = self.run(0, placed=True)
        return fault_report(head, births, before, after, names)


def _fail_once(
    step: Step, countdown: _Countdown, births: Births, place: int, counter: Counter, leases: int
) -> str:
    births.turn = place
    countdown.arm(place)
    try:
        step()
    except InjectedFault:
        pass
    except Exception:
        if not countdown.failed_in:
            raise  # the step's own failure; after the fault it is what the step made of it
    standing = len(counter.standing())
    if standing > leases:
        why = f": fault {place}, in the place of {countdown.failed_in}"
        raise lease_report(counter, standing - leases, 1, why)
    return countdown.failed_in


@contextmanager
def _failing_acquires(countdown: _Countdown, at: str, pools: tuple[Any, ...]) -> Iterator[None]:
    if at != "acquires":
        raise ValueError(f"faults at {at!r} are unknown; there are operations and acquires")
    if not pools:
        raise ValueError("faults at acquires need pools: inject_faults(step, at='acquires', pools=...)")

    def called(act: str, pool: Any, handles: tuple[Any, ...]) -> None:
        if act == "ask":
            countdown.tick(f"an acquire of {type(pool).__name__}")

    with counter_watched(pools, called):
        yield
