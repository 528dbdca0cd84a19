# poolaudit leaktests, sha256 76661fd189f783ce: written again as long as that is the digest of the rest
"""The fault pass: a failure at every operation, and at every acquire; afterwards nothing may stay held.

A step is run once to count, then once for each place with a failure there, but that the places of a backward
pass share one graph. When all have been tried and a step went well again, exactly as much must be alive as
before the first failure. It is quadratic, so steps are small here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .births import Births, Frames
from .countdown import Countdown
from .culprits import amount, fault_head, fault_report
from .errors import InjectedFault, Leak
from .late import LateWatch, Unwatched, living_nodes
from .leases import Counter, lease_report
from .ledger import Ledger, Level
from .one_graph import OneGraph
from .pools import Refusal, counter_watched, may_refuse

Step = Callable[[], object]
MOST_PLACES = 400


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, countdown: Countdown) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._countdown = countdown

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in watch.Watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._countdown.tick(func)
        return func(*args, **(kwargs or {}))


def count_places(step: Step, *, at: str = "operations", pools: tuple[Any, ...] = ()) -> int:
    """How many faults `inject_faults` would inject: the operations, or the acquires, of one step."""
    countdown = Countdown()
    with _Operations(countdown) if at == "operations" else _failing_acquires(countdown, at, pools):
        step()
    return countdown.passed


def inject_faults(
    step: Step,
    *,
    at: str = "operations",
    pools: tuple[Any, ...] = (),
    most: int = MOST_PLACES,
    warmup: int = 4,
    last: int | None = None,
    named: bool = True,
    line: str = "",
) -> int:
    """Fail at the k-th operation, for every k; returns how many faults that were.

    With `at="acquires"` it is the k-th acquire of `pools`, and with `at="refusals"` the k-th one that may
    answer None, as its annotation says, does so. For a twin whose leak is known, `last=1` fails at the last
    one only, and `named=False` spares the search for who holds the memory.

    The step may let the failure through or deal with it. Raises `Leak` if memory or a lease stays held, and
    ValueError if a step has more than `most` places. If memory stays, all are tried a second time to see
    where it is made. With `line` (`folder/file.py:12`) nothing counts but leases borrowed through that line.
    """
    attempt = _Attempt(step, at, pools, most, last, line)
    run = attempt.run(warmup, share=at != "refusals" and last is None)
    leases_alone = bool(line and pools)
    if run.out or (run.unsure and not leases_alone):
        run = attempt.run(0, placed=named)
    if run.grew and not leases_alone:
        head = fault_head(len(run.names), run.before, run.after)
        raise attempt.named(head, run) if named else Leak(head)
    return len(run.names)


@dataclass(frozen=True)
class _Run:
    """What was alive before and after all faults, and in which operation's place each was."""

    before: Level
    after: Level
    names: dict[int, str]
    births: Births
    nodes: bool
    """Whether more nodes of graphs are alive, which may hold what a late watch did not see."""
    changed: bool
    """Whether a step has other operations when nobody listens to its calls."""
    shared: bool
    """Whether some faults shared a graph."""
    placed: bool
    out: bool = False
    """Whether one of those left a lease, which nobody can say yet: the run ended there."""

    @property
    def grew(self) -> bool:
        return self.after.storages > self.before.storages or self.after.bytes > self.before.bytes

    @property
    def unsure(self) -> bool:
        """Whether a run that watches everything, with a step for each fault, has to decide."""
        return self.nodes or self.changed or (self.grew and self.shared)


@dataclass(frozen=True)
class _Attempt:
    """All faults in turn."""

    step: Step
    at: str
    pools: tuple[Any, ...]
    most: int
    last: int | None
    line: str

    def run(self, warmup: int, *, placed: bool = False, share: bool = False) -> _Run:
        """Everything from the first step to the last look; with `share` no more is run and watched than is
        needed.
        """
        ledger, counter = Ledger(), Counter(self.line)
        countdown = Countdown(Refusal if self.at == "refusals" else InjectedFault)
        fail = _Fail(self.step, ledger, counter, countdown)
        with ExitStack() as exits:
            if self.pools:
                exits.enter_context(counter_watched(self.pools, counter.called))
            exits.enter_context(ledger)
            if self.at == "operations":
                ledger.watch.before = countdown.tick  # a second mode would double the cost of the pass
            else:
                exits.enter_context(_failing_acquires(countdown, self.at, self.pools))
            with ledger.unwatched():
                for _ in range(warmup):
                    self.step()
            kept = counter.standing()
            places = fail.count(share=share)
            if len(counter.standing()) > len(kept):
                more = len(counter.standing()) - len(kept)
                raise lease_report(counter, kept, more, "by a step without any fault")
            if places > self.most:
                raise ValueError(
                    f"a step has {places} {self.at}, the fault pass takes {self.most} (it is quadratic): "
                    "feed it smaller shapes and fewer layers, or pass most="
                )
            before, nodes = ledger.take_stock(), living_nodes() if share else 0
            ledger.births.placed, fail.leases = placed, counter.standing()
            first = 1 if self.last is None else places + 1 - self.last
            shared = fail.on_one_graph()
            if len(counter.standing()) != len(fail.leases):
                return _Run(before, before, {}, ledger.births, False, False, True, placed, out=True)
            left = (place for place in range(first, places + 1) if place not in shared)
            names = shared | {place: fail.once(place) for place in left}
            ledger.births.turn = 0
            changed = not fail.ends_well()
            after = ledger.take_stock()
            more = share and living_nodes() > nodes
            return _Run(before, after, names, ledger.births, more, changed, bool(shared), placed)

    def named(self, head: str, run: _Run) -> Leak:
        """The failure, with the lines that made what stayed."""
        if not run.placed:
            run = self.run(0, placed=True)
        leak = fault_report(head, run.births, run.before, run.after, run.names)
        without = self._left_without()
        return Leak(f"{leak}\n{without}", leak.culprits) if without else leak

    def _left_without(self) -> str:
        """What a step leaves that nothing fails in."""
        with Ledger() as ledger:
            self.step()
            first, second = ledger.take_stock(), ledger.window(self.step, 1)
        more = second.bytes - first.bytes
        return f"  a step without any fault leaves {amount(more)} too" if more > 0 else ""


@dataclass
class _Fail:
    """One fault after the other."""

    step: Step
    ledger: Ledger
    counter: Counter
    countdown: Countdown
    late: LateWatch | Unwatched | None = None
    graph: OneGraph | None = None
    leases: Sequence[Frames] = ()
    """Those that stand after a good step."""

    def count(self, *, share: bool = False) -> int:
        """How many places a good step has; with `share`, from now on no more is watched than is needed, and
        the faults of a backward pass have one graph.
        """
        self.countdown.arm(None)
        run: Callable[[], object] = self.step
        if share:
            counts_operations = self.ledger.watch.before is not None
            self.late = LateWatch(self.ledger.watch, self.countdown) if counts_operations else Unwatched()
            run = partial(self.late.learn, self.step)
            self.graph = OneGraph(self.step, self.countdown)
            run = partial(self.graph.learn, run)
        run()
        return self.countdown.passed

    def ends_well(self) -> bool:
        """One more good step; whether it goes as the first one did, as far as that is known."""
        self.countdown.arm(None)
        if self.graph is not None:
            return self.graph.goes_as_learned()
        self.step()
        return True

    def on_one_graph(self) -> dict[int, str]:
        """The faults of the backward pass, as far as one graph serves for them."""
        if self.graph is None:
            return {}
        watch = self.ledger.watch if isinstance(self.late, LateWatch) else None
        with self.ledger.unwatched():
            return self.graph.fail(lambda: len(self.counter.standing()) == len(self.leases), watch)

    def once(self, place: int) -> str:
        """Fail at this place; returns in which operation's place that was."""
        self.ledger.births.turn = place
        if self.late is not None:
            with self.ledger.unwatched(), self.late.before(place):
                self._step(place)
        if self.graph is None or not self.graph.stands_at(place, self.countdown.failed_in):
            self._step(place)  # watched from its first operation on
        more = len(self.counter.standing()) - len(self.leases)
        if more > 0:
            when = f"after fault {place}, in the place of {self.countdown.failed_in}"
            raise lease_report(self.counter, self.leases, more, when)
        return self.countdown.failed_in

    def _step(self, place: int) -> None:
        self.countdown.arm(place)
        try:
            self.step()
        except InjectedFault:
            pass
        except Exception:
            if not self.countdown.failed_in:
                raise  # the step's own failure; after the fault it is what the step made of it


@contextmanager
def _failing_acquires(countdown: Countdown, at: str, pools: tuple[Any, ...]) -> Iterator[None]:
    if at not in ("acquires", "refusals"):
        raise ValueError(f"faults at {at!r} are unknown; there are operations, acquires and refusals")
    if not pools:
        raise ValueError(f"faults at {at} need pools: inject_faults(step, at={at!r}, pools=...)")

    def called(act: str, pool: Any, handles: tuple[Any, ...]) -> None:
        kind = pool if isinstance(pool, type) else type(pool)
        if act == "ask" and (at == "acquires" or may_refuse(kind)):
            countdown.tick(f"an acquire of {type(pool).__name__}")

    with counter_watched(pools, called):
        yield
