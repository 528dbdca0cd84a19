"""Plans a tree: a process for each file, and a new one behind every target that brought its process down."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import msgspec

from auditor.leaktests.aims import best_aimed, code_targets
from auditor.leaktests.jobs import Job
from auditor.leaktests.plan import Aim, Answer, Plan, Recipe, Request, Target, Unplanned
from auditor.leaktests.targets import Found
from auditor.leaktests.workshop import Workshop

SECONDS = 30.0
"""How long one target may take, import of its file aside, until it counts as hanging."""
MOST_ROUNDS = 3
"""A wrapper of a model of layers needs the model first, which needs the layers."""
_STACK_LINES = 8


@dataclass(slots=True)
class Planned:
    """What probing came to."""

    plans: list[Plan] = field(default_factory=list)
    unplanned: list[Unplanned] = field(default_factory=list)
    import_seconds: float = 0.0

    @property
    def short(self) -> list[Unplanned]:
        """Modules and autograd functions that should have a plan and have none."""
        return [u for u in self.unplanned if not u.abstract and u.target.kind in ("module", "autograd")]


@dataclass(frozen=True, slots=True)
class Probe:
    """How targets are tried: where, for how long, with which recipes, towards which findings."""

    device: str = "cpu"
    seconds: float = SECONDS
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    aims: tuple[Aim, ...] = ()
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None


def plan_all(found: Found, probe: Probe, shop: Workshop) -> Planned:
    """A plan for every target that allows one. What needs another module as an argument is tried again when
    that one is known.
    """
    planned = Planned()
    targets = [target for target in found.targets if not _skipped(target, probe, planned)]
    _round(targets, found, probe, planned, shop, "planning")
    for _ in range(MOST_ROUNDS):
        again, known = [u.target for u in planned.unplanned if u.parts], len(planned.plans)
        if not again or not known:
            break
        before = {u.target.key: u for u in planned.unplanned}
        planned.unplanned = [u for u in planned.unplanned if u.target not in again]
        _round(again, found, probe, planned, shop, "planning with parts")
        planned.unplanned = [_clearer(before.get(u.target.key), u) for u in planned.unplanned]
        if len(planned.plans) == known:
            break
    deeper = [t for t in code_targets(planned.plans, probe.aims) if not _skipped(t, probe, planned)]
    _round(deeper, found, probe, planned, shop, "reaching findings")
    planned.plans = best_aimed(planned.plans)
    have = {plan.target.key for plan in planned.plans}
    planned.unplanned = [entry for entry in planned.unplanned if entry.target.key not in have]
    planned.plans.sort(key=lambda plan: plan.target)
    planned.unplanned.sort(key=lambda entry: entry.target)
    return planned


def _clearer(first: Unplanned | None, second: Unplanned) -> Unplanned:
    """Of two rounds, the one that got further: it has something that could be fed."""
    return first if first is not None and first.feed and not second.feed else second


def _skipped(target: Target, probe: Probe, planned: Planned) -> bool:
    recipe = probe.recipes.get(target.key)
    if recipe is None or not recipe.skip:
        return False
    planned.unplanned.append(Unplanned(target, f"left out by its recipe: {recipe.skip}", abstract=True))
    return True


def _round(
    targets: Sequence[Target], found: Found, probe: Probe, planned: Planned, shop: Workshop, stage: str
) -> None:
    files = [list(group) for _, group in groupby(sorted(targets), key=lambda target: target.path)]
    for number, group in enumerate(files):
        probe.progress(stage, number, len(files))
        for answer in _answers(group, found, probe, tuple(planned.plans), shop):
            if answer.plan is not None:
                planned.plans.append(answer.plan)
            elif answer.unplanned is not None:
                planned.unplanned.append(answer.unplanned)
            elif answer.imported is not None:
                planned.import_seconds += answer.imported
    probe.progress(stage, len(files), len(files))


def _answers(
    targets: list[Target], found: Found, probe: Probe, known: tuple[Plan, ...], shop: Workshop
) -> Iterator[Answer]:
    """One process for the file, and a new one behind each target that ends its process."""
    while targets:
        ours = {t.key for t in targets}
        request = Request(
            tuple(targets),
            {key: recipe for key, recipe in probe.recipes.items() if key in ours},
            known,
            tuple(found.configs),
            probe.aims,
            probe.device,
            probe.seconds,
        )
        answers, ended, stderr = _run(request, shop)
        done: set[str] = set()
        begun = ""
        for answer in answers:
            begun = answer.begun or begun
            result = answer.plan or answer.unplanned
            if result is not None:
                done.add(result.target.key)
            if not answer.begun:
                yield answer
        rest = [target for target in targets if target.key not in done]
        if not rest:
            return
        culprits = [target for target in rest if target.key == begun] or rest
        reason = how_it_ended(ended, stderr, importing=begun.endswith(":"))
        for target in culprits:
            yield Answer(unplanned=Unplanned(target, reason, attempts=_stack(stderr)))
        targets = [target for target in rest if target not in culprits]


def _run(request: Request, shop: Workshop) -> tuple[list[Answer], int, str]:
    """The answers of one process, how it ended, and the end of what it said."""
    with tempfile.TemporaryDirectory(prefix="poolaudit-") as folder:
        asked, answered, said = (Path(folder) / name for name in ("request", "answers", "said"))
        asked.write_bytes(msgspec.json.encode(request))
        answered.touch()
        limit = request.seconds * (len(request.targets) + 2) + 60
        ended = shop.run(Job(str(said), limit, str(asked), str(answered)))
        lines = answered.read_bytes().splitlines()
        text = said.read_bytes()[-20_000:].decode("utf-8", "replace")
        return [msgspec.json.decode(line, type=Answer) for line in lines if _whole(line)], ended, text


def _whole(line: bytes) -> bool:
    return line.startswith(b"{") and line.endswith(b"}")


def how_it_ended(status: int, stderr: str, *, importing: bool) -> str:
    """How the process came to its end, in a phrase."""
    when = "while its file was imported" if importing else "while it was tried"
    if "Timeout (" in stderr:
        return f"it hung {when} and was ended; its stack follows"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"it crashed the interpreter {when} ({name})"
    return f"it ended the interpreter {when} (status {status})"


def _stack(stderr: str) -> tuple[str, ...]:
    """The stack that faulthandler wrote, without our own frames."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip().startswith('File "')]
    ours = os.fspath(Path(__file__).parent)
    theirs = [line for line in lines if ours not in line and "importlib" not in line]
    return tuple((theirs or lines)[:_STACK_LINES])
