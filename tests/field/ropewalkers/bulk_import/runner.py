"""Runs the stages of all partners."""
from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from .cursors import Scratch, Warehouse, first_row, pages, row_count
from .stages import RunContext, StageCompare, StageImages, StageRows

log = logging.getLogger("import")


def run_partner(wh: Warehouse, partner: str, target: str, dry_run: bool) -> dict[str, int]:
    """One partner's feed through all stages, which are left in the reverse order."""
    ctx = RunContext(wh, partner, target, dry_run)
    entered = []
    for stage in (StageRows(), StageCompare(), StageImages()):
        entered.append(stage)
        if not stage.enter(ctx):
            log.warning("%s: stopped at %s", partner, stage.name)
            break
    while entered:
        entered.pop().leave(ctx)
    return ctx.stats


def export(wh: Warehouse, sql: str, into: str) -> Scratch | None:
    """A scratch table with the result; the caller drops it."""
    if row_count(wh, sql) <= 0:
        return None
    scratch = wh.create_scratch(into)  # clean: handed to the caller
    for page in pages(wh, sql):  # clean: run to the end
        scratch.load(page)
    return scratch


def changed_skus(wh: Warehouse, partner: str) -> set[str]:
    mine = export(wh, f"select sku, hash from feed_{partner}", "mine")  # leak: lost when the other is empty
    theirs = export(wh, f"select sku, hash from live_{partner}", "theirs")  # leak: lost when mine is empty
    if mine is None or theirs is None:
        return set()
    left = {(r["sku"], r["hash"]) for r in mine.rows}
    right = {(r["sku"], r["hash"]) for r in theirs.rows}
    wh.drop_scratch(mine)
    wh.drop_scratch(theirs)
    return {sku for sku, _ in left ^ right}


def export_in_background(wh: Warehouse, pool: ThreadPoolExecutor, sql: str, into: str) -> Future:
    scratch = wh.create_scratch(into)  # clean: near miss, dropped by the callback of the future

    def fill() -> int:
        return sum(scratch.load(page) for page in pages(wh, sql))  # clean: run to the end

    def finished(fut: Future) -> None:
        log.info("%s: %s rows", scratch.table, fut.result())
        wh.drop_scratch(scratch)

    future = pool.submit(fill)
    future.add_done_callback(finished)
    return future


def find_duplicate(wh: Warehouse, partner: str) -> str | None:
    seen: set[str] = set()
    for page in pages(wh, f"select sku from feed_{partner}"):  # clean: near miss, the generator has a finally
        for row in page:
            if row["sku"] in seen:
                return row["sku"]
            seen.add(row["sku"])
    return None


def sanity(wh: Warehouse, partners: list[str]) -> list[str]:
    return [p for p in partners if first_row(wh, f"select 1 from feed_{p}") is None]
