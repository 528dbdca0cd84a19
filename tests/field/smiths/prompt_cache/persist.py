from __future__ import annotations

import json
import os
from typing import List, Optional

from .radix import Node, PrefixTree

MAGIC = "pcache1"


def save_paths(tree: PrefixTree, path: str) -> int:
    out = open(path + ".tmp", "w")  # leak: an empty tree returns before close
    if not tree.root.children:
        return 0
    lines = 0
    stack = [(tree.root, [])]
    out.write(MAGIC + "\n")
    while stack:
        node, prefix = stack.pop()
        tokens = prefix + list(node.tokens)
        if not node.children:
            out.write(json.dumps(tokens) + "\n")
            lines += 1
        stack.extend((c, tokens) for c in node.children.values())
    out.close()
    os.replace(path + ".tmp", path)
    return lines


def load_paths(tree: PrefixTree, path: str) -> int:
    try:
        f = open(path)  # clean: near miss, the handler has no file and the with closes it
    except OSError:
        return 0
    with f:
        if f.readline().strip() != MAGIC:
            return 0
        n = 0
        for line in f:
            tree.insert(json.loads(line))
            n += 1
        return n


def verify(tree: PrefixTree, path: str) -> List[int]:
    """Line numbers whose path is no longer in the tree."""
    missing: List[int] = []
    f = open(path)  # clean: closed at the end, continue and break stay in the loop
    for i, line in enumerate(f):
        if line.startswith(MAGIC):
            continue
        tokens = json.loads(line)
        node = tree.match_min(tokens, len(tokens))  # leak: a path that is found stays locked
        if node is not None:
            continue
        missing.append(i)
    f.close()
    return missing


def longest(tree: PrefixTree, path: str) -> int:
    best: Optional[Node] = None
    with open(path) as f:  # clean: with closes it
        for line in f:
            if line.startswith(MAGIC):
                continue
            node = tree.match(json.loads(line))  # clean: near miss, the shorter of two is unlocked, the best at the end
            if best is not None and best.depth >= node.depth:
                tree.unlock_path(node)
                continue
            if best is not None:
                tree.unlock_path(best)
            best = node
    if best is None:
        return 0
    depth = best.depth
    tree.unlock_path(best)
    return depth
