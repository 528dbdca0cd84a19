# poolaudit leaktests, sha256 81373781ab082cda: written again as long as that is the digest of the rest
"""The fault pass: a failure at every operation, and at every acquire; afterwards nothing may stay held.

A step is run once to count, then once for each place with a failure there. When all have been tried and a
step went well again, exactly as much must be alive as before the first failure. It is quadratic, so steps
are small here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .births import Births
from .culprits import fault_report
from .errors import InjectedFault
from .leases import Counter, lease_report
from .ledger import Ledger
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

    def tick(self, what: str) -> None:
        self.passed += 1
        if self.passed == self.fails_at:
            self.failed_in = what
            raise InjectedFault(f"injected at call {self.passed}, in the place of {what}")


class _FailingOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, countdown: _Countdown) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._countdown = countdown

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in births.Watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._countdown.tick(str(func))
        return func(*args, **(kwargs or {}))


def count_places(step: Step, *, at: str = "operations", pools: tuple[Any, ...] = ()) -> int:
    """How many faults `inject_faults` would inject: the operations, or the acquires, of one step."""
    countdown = _Countdown()
    with _failing(countdown, at, pools):
        step()
    return countdown.passed


def inject_faults(
    step: Step,
    *,
    at: str = "operations",
    pools: tuple[Any, ...] = (),
    most: int = MOST_PLACES,
    warmup: int = 3,
) -> int:
    """Fail at the k-th operation (or the k-th acquire of `pools`), for every k; returns how many faults that
    were.

    The step may let the failure through or deal with it. Raises `Leak` if memory or a lease stays held, and
    ValueError if a step has more than `most` places.
    """
    countdown, ledger, counter = _Countdown(), Ledger(), Counter()
    with ExitStack() as exits:
        if pools:
            exits.enter_context(counter_watched(pools, counter.called))
        exits.enter_context(ledger)
        for _ in range(warmup):
            step()
        places = count_places(step, at=at, pools=pools)
        if places > most:
            raise ValueError(
                f"a step has {places} {at}, the fault pass takes {most} (it is quadratic): feed it smaller "
                "shapes and fewer layers, or pass most="
            )
        step()
        before, leases = ledger.take_stock(), len(counter.standing())
        exits.enter_context(_failing(countdown, at, pools))
        names = []
        for place in range(1, places + 1):
            names.append(_fail_once(step, countdown, ledger.births, place, counter, leases))
        countdown.arm(None)
        step()
        after = ledger.take_stock()
        if after.storages > before.storages or after.bytes > before.bytes:
            raise fault_report(ledger.births, before, after, names)
    return places


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
def _failing(countdown: _Countdown, at: str, pools: tuple[Any, ...]) -> Iterator[None]:
    if at == "operations":
        with _FailingOperations(countdown):
            yield
    elif at == "acquires":
        if not pools:
            raise ValueError("faults at acquires need pools: inject_faults(step, at='acquires', pools=...)")

        def called(act: str, pool: Any, handles: tuple[Any, ...]) -> None:
            if act == "ask":
                countdown.tick(f"an acquire of {type(pool).__name__}")

        with counter_watched(pools, called):
            yield
    else:
        raise ValueError(f"faults at {at!r} are unknown; there are operations and acquires")
