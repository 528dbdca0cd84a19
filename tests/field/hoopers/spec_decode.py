"""Speculative decoding on a llama.cpp-like sequence store.  A sequence id names
a row of the KV cache; drafts, trees, votes and rollbacks work on forks of it."""
import logging
import math
from collections import Counter

logger = logging.getLogger("spec")

class SeqLimit(Exception):
    pass

class DraftDiverged(Exception):
    def __init__(self, at):
        super().__init__(f"draft diverged at {at}")
        self.at = at

class SeqStore:
    def __init__(self, kv, n):
        self.kv = kv
        self._ids = list(range(n))
        self._len = {}

    def open(self):
        if not self._ids:
            raise SeqLimit(f"{len(self._len)} sequences are open")
        sid = self._ids.pop()  # clean: returned
        self._len[sid] = 0
        return sid

    def fork(self, src, upto=None):
        sid = self.open()  # leak: the length check raises ValueError with the new id open
        n = self._len[src]
        if upto is not None:
            if upto > n:
                raise ValueError(f"sequence {src} has {n} tokens, not {upto}")
            n = upto
        self.kv.seq_cp(src, sid, 0, n)
        self._len[sid] = n
        return sid

    def close(self, sid):
        self.kv.seq_rm(sid)
        del self._len[sid]
        self._ids.append(sid)

    def truncate(self, sid, n):
        self.kv.seq_rm(sid, n)
        self._len[sid] = n

    def grow(self, sid, n):
        self._len[sid] += n

    def length(self, sid):
        return self._len[sid]

class Node:
    __slots__ = ("sid", "token", "logp", "parent", "kids", "depth")

    def __init__(self, sid, token, logp, parent=None):
        self.sid, self.token, self.logp, self.parent = sid, token, logp, parent
        self.kids = []
        self.depth = 0 if parent is None else parent.depth + 1

    def walk(self):
        yield self
        for kid in self.kids:
            yield from kid.walk()

def propose(store, draft, target_sid, k):
    """k draft tokens after the target sequence, with their log probabilities."""
    sid = store.fork(target_sid)  # clean: closed in the finally
    out = []
    try:
        tok = None
        for _ in range(k):
            logits = draft.step(sid, tok)
            tok, logp = _pick(logits)
            if tok == draft.eos:
                return out
            out.append((tok, logp))
            store.grow(sid, 1)
        return out
    finally:
        store.close(sid)

def draft_tokens(store, draft, target_sid, limit):
    """Tokens one by one, for callers that look at each before they want the next."""
    sid = store.fork(target_sid)  # leak: a consumer that breaks ends the generator at the yield, close is after the loop and in no finally
    tok = None
    for _ in range(limit):
        tok, logp = _pick(draft.step(sid, tok))
        store.grow(sid, 1)
        yield tok, logp
    store.close(sid)

def confident_prefix(store, draft, target_sid, limit=16, floor=-0.7):
    prefix = []
    for tok, logp in draft_tokens(store, draft, target_sid, limit):
        if logp < floor or tok == draft.eos:
            break
        prefix.append(tok)
    return prefix

def _pick(logits):
    tok = max(range(len(logits)), key=logits.__getitem__)
    z = math.log(sum(math.exp(x) for x in logits))
    return tok, logits[tok] - z

class TreeDrafter:
    def __init__(self, store, draft, width=4, fanout=3):
        self.store, self.draft = store, draft
        self.width, self.fanout = width, fanout

    def build(self, target_sid, depth):
        root = Node(self.store.fork(target_sid), None, 0.0)  # clean: near miss, settle() or discard() closes every node of the tree
        level = [root]
        try:
            for _ in range(depth):
                level = self._expand(level)
        except SeqLimit:
            logger.debug("tree stops at depth %d", level[0].depth if level else 0)
        return root

    def _expand(self, level):
        cand = []
        for node in level:
            logits = self.draft.step(node.sid, node.token)
            best = sorted(range(len(logits)), key=lambda t: -logits[t])[:self.fanout]
            for tok in best:
                sid = self.store.fork(node.sid)  # leak: candidates over the width are cut off the list and never hang in the tree
                cand.append(Node(sid, tok, node.logp + logits[tok], node))
        cand.sort(key=lambda n: -n.logp)
        chosen = cand[:self.width]
        for node in chosen:
            node.parent.kids.append(node)
        return chosen

    def settle(self, root, accepted):
        """Close the tree but for the accepted leaf, whose id goes to the caller."""
        for node in list(root.walk()):
            if node is not accepted:
                self.store.close(node.sid)
        return accepted.sid

    def discard(self, root):
        for node in list(root.walk()):
            self.store.close(node.sid)

class NgramMemo:
    """Keeps forks of prompts that come again and again."""

    def __init__(self, store, room):
        self.store, self.room = store, room
        self._memo = {}

    def remember(self, key, sid):
        if key in self._memo:
            return
        while len(self._memo) >= self.room:
            old = next(iter(self._memo))
            self.store.close(self._memo.pop(old))
        self._memo[key] = self.store.fork(sid)  # clean: no entry is overwritten and eviction closes the id

    def start_from(self, key):
        sid = self._memo.get(key)
        if sid is None:
            return self.store.open()  # clean: returned
        return self.store.fork(sid)  # clean: returned

    def clear(self):
        while self._memo:
            self.store.close(self._memo.popitem()[1])

class Stream:
    def __init__(self, rid, prompt):
        self.rid, self.prompt = rid, prompt
        self.sid = None
        self.tokens = []

class SpecEngine:
    def __init__(self, store, draft, target, memo, k=5):
        self.store, self.draft, self.target, self.memo, self.k = store, draft, target, memo, k
        self.trees = TreeDrafter(store, draft)
        self.live = {}

    def start(self, st, key):
        if st.rid in self.live:
            return
        if st.sid is None:
            st.sid = self.memo.start_from(key)  # clean: near miss, suspend() closes the id of the stream
            self.target.prefill(st.sid, st.prompt + st.tokens)
        self.live[st.rid] = st

    def suspend(self, st):
        self.live.pop(st.rid, None)
        if st.sid is not None:
            self.store.close(st.sid)
            st.sid = None

    def step(self, st):
        prop = propose(self.store, self.draft, st.sid, self.k)
        verdict = self.target.verify(st.sid, [t for t, _ in prop])
        st.tokens += verdict.accepted
        self.store.truncate(st.sid, len(st.prompt) + len(st.tokens))
        return len(verdict.accepted)

    def step_tree(self, st, depth=4):
        root = self.trees.build(st.sid, depth)  # clean: near miss, discard or settle closes it, the accepted id replaces the stream's
        path = self.target.verify_tree(st.sid, root)
        if not path:
            self.trees.discard(root)
            return 0
        fresh = self.trees.settle(root, path[-1])  # clean: the stream takes it over after its own id is closed
        self.store.close(st.sid)
        st.sid = fresh
        st.tokens += [n.token for n in path if n.token is not None]
        return len(path) - 1

    def step_guarded(self, st):
        """Run a risky step; go back to the snapshot where the target says no."""
        snap = self.store.fork(st.sid)  # leak: DraftDiverged is handled without closing the snapshot or taking it
        try:
            n = self.step(st)
            ok = self.target.check(st.sid, st.tokens[-n:])
        except DraftDiverged as exc:
            logger.warning("%s: %s", st.rid, exc)
            self.store.truncate(st.sid, exc.at)
            return 0
        if ok:
            self.store.close(snap)
            return n
        self.store.close(st.sid)
        st.sid = snap
        del st.tokens[len(st.tokens) - n:]
        return 0

    def vote(self, st, n, limit=512):
        """Self-consistency: the answer most of n continuations agree on."""
        forks = []
        try:
            for _ in range(n):
                forks.append(self.store.fork(st.sid))  # leak: an early majority returns with the forks not run yet
        except SeqLimit:
            logger.info("only %d voters", len(forks))
        votes = Counter()
        while forks:
            sid = forks.pop()
            answer = self.target.run(sid, limit)
            self.store.close(sid)
            votes[answer] += 1
            if votes[answer] * 2 > n:
                return answer
        return votes.most_common(1)[0][0] if votes else None

    def shutdown(self):
        for st in list(self.live.values()):
            self.suspend(st)
        self.memo.clear()
