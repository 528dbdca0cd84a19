"""Stages of an import. Each gets the context of the run and says whether to go on."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .cursors import Cursor, Scratch, Warehouse, pages

log = logging.getLogger("import")


@dataclass
class RunContext:
    wh: Warehouse
    partner: str
    target: str
    dry_run: bool = False
    scratch: Scratch | None = None
    compare: Cursor | None = None
    stats: dict[str, int] = field(default_factory=dict)


class Stage:
    name = "stage"

    def enter(self, ctx: RunContext) -> bool:
        return True

    def leave(self, ctx: RunContext) -> None:
        pass


class StageRows(Stage):
    name = "rows"

    def enter(self, ctx: RunContext) -> bool:
        ctx.scratch = ctx.wh.create_scratch(ctx.target)  # clean: near miss, leave swaps it in or drops it
        for page in pages(ctx.wh, f"select * from feed_{ctx.partner}"):  # clean: run to the end
            ctx.scratch.load([r for r in page if r.get("sku")])
        ctx.stats["rows"] = len(ctx.scratch.rows)
        return bool(ctx.scratch.rows)

    def leave(self, ctx: RunContext) -> None:
        if ctx.scratch is None:
            return
        if ctx.dry_run or not ctx.scratch.rows:
            ctx.wh.drop_scratch(ctx.scratch)
        else:
            ctx.wh.swap_in(ctx.scratch, ctx.target)
        ctx.scratch = None


class StageCompare(Stage):
    name = "compare"

    def enter(self, ctx: RunContext) -> bool:
        ctx.compare = ctx.wh.declare_cursor(f"select * from {ctx.target}")  # leak: left open on a dry run
        if ctx.compare is None:
            return False
        ctx.stats["sample"] = len(ctx.compare.fetch(100))
        return True

    def leave(self, ctx: RunContext) -> None:
        if ctx.dry_run:
            log.info("%s: sample of %d", ctx.partner, ctx.stats.get("sample", 0))
            return
        if ctx.compare is not None:
            ctx.wh.close_cursor(ctx.compare)
            ctx.compare = None


class StageImages(Stage):
    name = "images"

    def enter(self, ctx: RunContext) -> bool:
        if ctx.dry_run:
            return True
        work = ctx.wh.create_scratch("images")  # leak: not dropped when nothing is missing
        for page in pages(ctx.wh, f"select sku, image from feed_{ctx.partner}"):  # clean: run to the end
            work.load([r for r in page if not r.get("image")])
        if not work.rows:
            ctx.stats["images"] = 0
            return True
        ctx.stats["images"] = len(work.rows)
        ctx.wh.swap_in(work, "missing_images")
        return True
