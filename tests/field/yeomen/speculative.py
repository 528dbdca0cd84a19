"""Speculative decoding with a draft model and a token tree.

State is plain data: a pool is a dict with a list of free cache slots, and the
functions below pass it around.
"""
import logging
from collections import namedtuple
from typing import Dict, List

import numpy as np

log = logging.getLogger("spec")

Node = namedtuple("Node", "token slot parent depth")


class DraftDiverged(Exception):
    pass


class OutOfSlots(Exception):
    pass


def new_pool(n: int) -> dict:
    return {"free": list(range(n)), "size": n, "low": n, "draws": 0}


def grab(pool: dict, n: int) -> List[int]:
    if len(pool["free"]) < n:
        raise OutOfSlots(f"{n} wanted, {len(pool['free'])} left")
    got = [pool["free"].pop() for _ in range(n)]  # clean: the list goes to the caller
    pool["low"] = min(pool["low"], len(pool["free"]))
    pool["draws"] += 1
    return got


def grab_up_to(pool: dict, n: int) -> List[int]:
    return grab(pool, min(n, len(pool["free"])))  # clean: goes to the caller


def grab_aligned(pool: dict, n: int, align: int = 4) -> List[int]:
    """n neighbouring slots that start on a multiple of align, or []."""
    pool["free"].sort(reverse=True)
    run: List[int] = []
    while pool["free"]:
        slot = pool["free"].pop()  # leak: slots ahead of the run that fits are dropped when run starts over
        if run and slot == run[-1] + 1:
            run.append(slot)
        elif slot % align == 0:
            run = [slot]
        else:
            run = []
        if len(run) == n:
            return run
    return []


def drop(pool: dict, slots) -> None:
    pool["free"].extend(slots)


# ---------------------------------------------------------------- sequences

def new_seq(sid: int, prompt: List[int], pool: dict, budget: int) -> dict:
    slots = grab(pool, len(prompt))  # clean: near miss, the dict owns them and retire() or forget() drops them
    return {
        "id": sid,
        "tokens": list(prompt),
        "slots": slots,
        "budget": budget,
        "accepted": 0,
        "proposed": 0,
        "failed": False,
    }


def forget(pool: dict, seq: dict) -> None:
    drop(pool, seq["slots"])
    seq["slots"] = []


def retire(pool: dict, seqs: List[dict]) -> List[dict]:
    """Takes finished sequences out and returns the others."""
    keep = []
    for seq in seqs:
        if len(seq["tokens"]) >= seq["budget"] or seq["failed"]:
            forget(pool, seq)
        else:
            keep.append(seq)
    return keep


# ---------------------------------------------------------------- chains

def draft_chain(draft, seq: dict, width: int, scratch: List[int]) -> List[int]:
    tokens = []
    last = seq["tokens"][-1]
    for slot in scratch[:width]:
        last = int(draft.next(last, slot))
        if last == draft.eos and not tokens:
            raise DraftDiverged(seq["id"])
        tokens.append(last)
    return tokens


def speculate_chain(draft, target, seq: dict, pool: dict, width: int) -> int:
    scratch = grab_up_to(pool, width)  # leak: nothing accepted returns early, and a diverged draft is caught in step()
    tokens = draft_chain(draft, seq, width, scratch)
    seq["proposed"] += len(tokens)
    good = target.verify(seq["tokens"], tokens)
    if good == 0:
        return 0
    seq["tokens"].extend(tokens[:good])
    seq["slots"].extend(scratch[:good])
    drop(pool, scratch[good:])
    seq["accepted"] += good
    return good


def bonus_token(target, seq: dict, pool: dict) -> None:
    (slot,) = grab(pool, 1)  # clean: near miss, stays in the sequence, which is retired with its slots
    seq["slots"].append(slot)
    seq["tokens"].append(int(target.sample(seq["tokens"], slot)))


# ---------------------------------------------------------------- trees

def grow_tree(draft, seq: dict, pool: dict, fanout: List[int]) -> Dict[tuple, Node]:
    """Nodes by (parent slot, token)."""
    root = seq["slots"][-1]
    tree: Dict[tuple, Node] = {}
    level = [root]
    for depth, k in enumerate(fanout):
        nxt = []
        for parent in level:
            for token in draft.topk(parent, k):
                (slot,) = grab(pool, 1)  # leak: OutOfSlots halfway leaves the nodes so far in a local dict, and step() handles it
                tree[(parent, int(token))] = Node(int(token), slot, parent, depth)
                nxt.append(slot)
        level = nxt
    return tree


def best_path(tree: Dict[tuple, Node], root: int, choice) -> List[Node]:
    path, at = [], root
    while True:
        token = choice(at)
        node = tree.get((at, token))
        if node is None:
            return path
        path.append(node)
        at = node.slot


def speculate_tree(draft, target, seq: dict, pool: dict, fanout: List[int]) -> int:
    tree = grow_tree(draft, seq, pool, fanout)  # clean: near miss, the path stays in the sequence, all the rest is dropped
    path = best_path(tree, seq["slots"][-1], target.choice)
    kept = {n.slot for n in path}
    drop(pool, [n.slot for n in tree.values() if n.slot not in kept])
    seq["tokens"].extend(n.token for n in path)
    seq["slots"].extend(n.slot for n in path)
    seq["accepted"] += len(path)
    return len(path)


# ---------------------------------------------------------------- driver

def step(draft, target, seqs: List[dict], pool: dict, cfg: dict) -> List[dict]:
    for seq in seqs:
        try:
            if cfg["tree"]:
                speculate_tree(draft, target, seq, pool, cfg["fanout"])
            else:
                speculate_chain(draft, target, seq, pool, cfg["width"])
            bonus_token(target, seq, pool)
        except DraftDiverged:
            log.info("draft of %d diverged", seq["id"])
        except OutOfSlots as exc:
            log.warning("%d: %s", seq["id"], exc)
            seq["failed"] = True
    return retire(pool, seqs)


def measure(draft, target, pool: dict, prompts, width: int):
    """Acceptance rate of each prompt, one after the other."""
    for i, prompt in enumerate(prompts):
        seq = new_seq(-i, prompt, pool, len(prompt) + width)  # leak: the continue for short prompts is ahead of the try
        if len(prompt) < 2:
            continue
        try:
            speculate_chain(draft, target, seq, pool, width)
            yield seq["accepted"] / max(1, seq["proposed"])
        finally:
            forget(pool, seq)


def capture_graph(target, pool: dict, width: int):
    slots = grab_aligned(pool, width)  # clean: an empty list holds nothing
    if not slots:
        return None
    graph = target.capture(np.asarray(slots))
    drop(pool, slots)
    return graph


def serve(draft, target, requests, pool: dict, cfg: dict) -> Dict[int, List[int]]:
    seqs: List[dict] = []
    done: Dict[int, List[int]] = {}
    for sid, prompt, budget in requests:
        try:
            seq = new_seq(sid, prompt, pool, budget)  # leak: a budget below the prompt is refused and the dict is forgotten
        except OutOfSlots:
            done[sid] = []
            continue
        if budget <= len(prompt):
            log.error("%d: budget %d is too small", sid, budget)
            continue
        seqs.append(seq)
        done[sid] = seq["tokens"]
    while seqs:
        seqs = step(draft, target, seqs, pool, cfg)
    log.info("low water %d of %d", pool["low"], pool["size"])
    return done
