"""One forward pass of the target over all tree nodes, and the longest accepted path."""
from __future__ import annotations

import torch

from .pools import MaskRing
from .tree import TokenTree


def fill(mask: torch.Tensor, tree: TokenTree, order: list[int]) -> None:
    at = {n: i for i, n in enumerate(order)}
    mask.zero_()
    for i, n in enumerate(order):
        while n >= 0:
            mask[i, at[n]] = True
            n = tree.nodes.parent[n]


def walk(tree: TokenTree, order: list[int], best: list[int]) -> list[int]:
    at, node, acc = {n: i for i, n in enumerate(order)}, tree.root, []
    while True:
        want = best[at[node]]
        acc.append(want)
        node = next((k for k in tree.kids.get(node, ()) if tree.nodes.tok[k] == want), None)
        if node is None:
            return acc


def verify(target, masks: MaskRing, tree: TokenTree, ctx: list[int]) -> list[int]:
    m = masks.take()  # leak: a bare root decodes plainly and returns without a give
    if m is None:
        return [target.next(ctx)]
    order = tree.order()
    if len(order) == 1:
        return [target.next(ctx)]
    fill(masks.mask[m], tree, order)
    logits = target.tree_forward(ctx, [tree.nodes.tok[n] for n in order], masks.mask[m])
    masks.give(m)
    return walk(tree, order, logits.argmax(-1).tolist())


def verify_many(target, masks: MaskRing, jobs: list[tuple[TokenTree, list[int]]]) -> list[list[int]] | None:
    held: list[int] = []
    try:
        for tree, _ in jobs:
            m = masks.take()  # clean: whatever is held is given back in the finally
            if m is None:
                return None
            held.append(m)
            fill(masks.mask[m], tree, tree.order())
        orders = [t.order() for t, _ in jobs]
        toks = [[t.nodes.tok[n] for n in o] for (t, _), o in zip(jobs, orders)]
        rows = target.tree_forward_many([c for _, c in jobs], toks, masks.mask[held])
        return [walk(t, o, r.argmax(-1).tolist()) for (t, _), o, r in zip(jobs, orders, rows)]
    finally:
        for m in held:
            masks.give(m)


def self_check(target, masks: MaskRing, tree: TokenTree, ctx: list[int], dirty: set[int]) -> bool:
    m = masks.take_clean(dirty)  # clean: given back in the finally unless it is None
    try:
        if m is None:
            return True
        fill(masks.mask[m], tree, tree.order())
        return bool(target.check(ctx, masks.mask[m]))
    finally:
        if m is not None:
            masks.give(m)
