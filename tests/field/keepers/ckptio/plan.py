"""Which parts of which file a rank reads."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from .store import ObjectStore


@dataclass
class LoadPlan:
    step: int
    parts: List[str] = field(default_factory=list)
    sizes: Dict[str, int] = field(default_factory=dict)


def make_plan(store: ObjectStore, step: int, rank: int, world: int) -> Optional[LoadPlan]:
    folder = store.lease(step)  # leak: a step without a manifest is answered with None and stays leased
    if folder is None:
        return None
    manifest = store.open_part(folder, "manifest.json")  # clean: closed after the load
    if manifest is None:
        return None
    meta = json.load(manifest)
    manifest.close()
    names = sorted(meta)[rank::world]
    return LoadPlan(step, names, {n: meta[n]["size"] for n in names})


def finish_plan(store: ObjectStore, plan: LoadPlan) -> None:
    store.unlease(plan.step)


def step_size(store: ObjectStore, step: int) -> int:
    folder = store.lease(step)  # clean: near miss, the finally takes the lease off after either return
    if folder is None:
        return -1
    try:
        manifest = store.open_part(folder, "manifest.json")  # clean: closed by the with
        if manifest is None:
            return 0
        with manifest:
            return sum(part["size"] for part in json.load(manifest).values())
    finally:
        store.unlease(step)
