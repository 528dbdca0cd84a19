"""Findings on their way to a test: what reaches them beyond modules, and which test is the one to keep."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from auditor.leaktests.plan import Aim, Plan, Target, Variation
from auditor.leaktests.targets import import_name, is_test


def code_targets(plans: Sequence[Plan], aims: Sequence[Aim]) -> list[Target]:
    """For findings that no plan reaches: the functions and methods they are in, to be called themselves."""
    reached = {variation.fingerprint for plan in plans for variation in plan.aimed}
    taken = {plan.target.key for plan in plans}
    targets: dict[str, Target] = {}
    for aim in aims:
        path, _, line = aim.where.rpartition(":")
        if aim.fingerprint in reached or not _callable(aim.symbol) or is_test(path):
            continue
        module, root = import_name(aim.location)
        target = Target(path, int(line), module, aim.symbol, "code", root)
        if target.key not in taken:
            targets.setdefault(target.key, target)
    return sorted(targets.values())


def _callable(symbol: str) -> bool:
    """A function of the file or a method of one of its classes: what is deeper has no name to call it by."""
    parts = symbol.split(".")
    return len(parts) in (1, 2) and all(part.isidentifier() for part in parts)


def best_aimed(plans: Sequence[Plan]) -> list[Plan]:
    """Each finding with one test: where it showed when it was tried, then where its own file is planned.
    Plans of code that only findings lead to are dropped if they are left without one.
    """
    best: dict[str, tuple[tuple[bool, bool], Plan]] = {}
    for plan in plans:
        for variation in plan.aimed:
            rank = (variation.shown, _same_file(plan, variation))
            if variation.fingerprint not in best or rank > best[variation.fingerprint][0]:
                best[variation.fingerprint] = (rank, plan)
    kept = []
    for plan in plans:
        aimed = tuple(v for v in plan.aimed if best[v.fingerprint][1] is plan)
        if aimed or plan.target.kind != "code":
            kept.append(msgspec.structs.replace(plan, aimed=aimed))
    return kept


def _same_file(plan: Plan, variation: Variation) -> bool:
    return Path(plan.target.path) == Path(variation.where.rpartition(":")[0])
