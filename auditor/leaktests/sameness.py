"""Whether changed code makes of the same inputs what it made of them before.

The two copies of a tree run in processes of their own, with the same plans and seeds. What is different is
tried once more against the unchanged copy itself: code whose results come and go can be held against nothing.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec

from auditor.leaktests.jobs import Job
from auditor.leaktests.plan import Plan, Replay, Replayed, Target
from auditor.leaktests.probing import how_it_ended
from auditor.leaktests.workshop import Workshop


@dataclass(frozen=True, slots=True)
class Versions:
    """Two folders that hold the same tree, as it was and as it would be; plans were made in the second."""

    before: Path
    after: Path


def changed_results(plans: Sequence[Plan], versions: Versions, shop: Workshop) -> dict[str, str]:
    """By path, what is no longer the same about the first of its targets that changed."""
    found: dict[str, str] = {}
    ordered = sorted(plans, key=lambda plan: plan.target)
    for path, group in groupby(ordered, key=lambda plan: plan.target.path):
        why = _of_a_file(list(group), versions, shop)
        if why:
            found[path] = why
    return found


def _of_a_file(plans: list[Plan], versions: Versions, shop: Workshop) -> str:
    old = [_moved(plan, versions) for plan in plans]
    with tempfile.TemporaryDirectory(prefix="poolaudit-") as folder:
        if why := _first(_replayed(Replay(tuple(old), old[0].target.root, folder), shop)):
            return f"its results as it is cannot be had: {plans[why[0]].target.name}: {why[1]}"
        compared = Replay(tuple(plans), plans[0].target.root, folder, compares=True)
        changed = _first(_replayed(compared, shop))
        if changed is None:
            return ""
        name, what = plans[changed[0]].target.name, changed[1]
        again = Replay(tuple(old), old[0].target.root, folder, compares=True)
        unsteady = dict(_replayed(again, shop)).get(changed[0])
        if unsteady:
            return f"nothing can be said of its results, which change by themselves: {name}, {unsteady}"
        return f"its results change: {name}, {what}"


def _first(told: Iterator[tuple[int, str]]) -> tuple[int, str] | None:
    return next(((number, what) for number, what in told if what), None)


def _moved(plan: Plan, versions: Versions) -> Plan:
    """The same plan, for the unchanged tree."""
    inside = os.path.relpath(plan.target.root, versions.after)
    target: Target = msgspec.structs.replace(plan.target, root=os.path.normpath(versions.before / inside))
    moved: Plan = msgspec.structs.replace(plan, target=target)
    return moved


def _replayed(replay: Replay, shop: Workshop) -> Iterator[tuple[int, str]]:
    """What one process says of each plan; of the one that ended the process, how."""
    with tempfile.TemporaryDirectory(prefix="poolaudit-") as folder:
        asked, answered, said = (Path(folder) / name for name in ("request", "answers", "said"))
        asked.write_bytes(msgspec.json.encode(replay))
        answered.touch()
        limit = replay.seconds * (len(replay.plans) + 2)
        status = shop.run(Job(str(said), limit, str(asked), str(answered), replays=True))
        lines = answered.read_bytes().splitlines()
        text = said.read_bytes()[-20_000:].decode("utf-8", "replace")
    answers = [msgspec.json.decode(line, type=Replayed) for line in lines if line.endswith(b"}")]
    done = {answer.number: answer.told for answer in answers if answer.told is not None}
    yield from done.items()
    if len(done) < len(replay.plans):
        begun = max((answer.number for answer in answers), default=0)
        yield begun, how_it_ended(status, text, importing=False)
