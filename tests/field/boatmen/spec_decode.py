"""Speculative decoding: a draft model proposes, the target model verifies.

Draft state lives in a small number of lanes. The code is written as generators
which the engine advances one step at a time.
"""

import contextlib
import logging
from collections import namedtuple

import torch

LOG = logging.getLogger("spec")

Proposal = namedtuple("Proposal", "tokens probs lane")
Verdict = namedtuple("Verdict", "accepted bonus")


class LanesExhausted(Exception):
    pass


class VerifyMismatch(Exception):
    pass


class Lanes:
    """A bit mask of lanes; lane i is row i of the draft model's cache."""

    def __init__(self, count, depth):
        self.mask = (1 << count) - 1
        self.count = count
        self.depth = depth
        self.lengths = [0] * count

    def open(self, prefix_len):
        if not self.mask:
            raise LanesExhausted(self.count)
        lane = (self.mask & -self.mask).bit_length() - 1
        self.mask &= ~(1 << lane)
        self.lengths[lane] = prefix_len
        return lane

    def shut(self, lane):
        self.lengths[lane] = 0
        self.mask |= 1 << lane

    @contextlib.contextmanager
    def opened(self, prefix_len):
        lane = self.open(prefix_len)  # clean: shut in the finally
        try:
            yield lane
        finally:
            self.shut(lane)

    def busy(self):
        return self.count - bin(self.mask).count("1")


class LogitBuffers:
    def __init__(self, n, vocab, device):
        self.stack = [torch.empty(8, vocab, device=device) for _ in range(n)]

    def lend(self):
        return self.stack.pop() if self.stack else None  # clean: handed out

    def restore(self, buf):
        self.stack.append(buf)


def propose(draft, lane, last, k):
    tokens, probs = [], []
    for _ in range(k):
        p = draft.forward(lane, last)
        last = int(torch.multinomial(p, 1))
        tokens.append(last)
        probs.append(p)
    return Proposal(tokens, probs, lane)


def verify(target, seq, prop, buf):
    logits = target.forward(seq, prop.tokens, out=buf)
    if logits.shape[0] < len(prop.tokens):
        raise VerifyMismatch(f"{logits.shape[0]} rows for {len(prop.tokens)} tokens")
    accepted = []
    for i, tok in enumerate(prop.tokens):
        q = torch.softmax(logits[i], -1)
        ratio = q[tok] / prop.probs[i][tok].clamp_min(1e-9)
        if torch.rand(()) > ratio:
            residual = (q - prop.probs[i]).clamp_min(0)
            return Verdict(accepted, int(torch.multinomial(residual, 1)))
        accepted.append(tok)
    return Verdict(accepted, int(logits[len(prop.tokens) - 1].argmax()))


def decode(seq, draft, target, lanes, bufs, k=4):
    """Yields lists of accepted tokens; the engine may close it at any yield."""
    lane = None
    try:
        lane = lanes.open(len(seq.tokens))  # clean: near miss, the finally shuts it also when the generator is closed
        draft.prefill(lane, seq.tokens)
        while not seq.done:
            prop = propose(draft, lane, seq.tokens[-1], k)
            buf = bufs.lend()  # leak: VerifyMismatch is handled by a break that goes past restore
            if buf is None:
                yield []
                continue
            try:
                verdict = verify(target, seq, prop, buf)
            except VerifyMismatch as exc:
                LOG.error("%s: %s", seq.id, exc)
                break
            bufs.restore(buf)
            seq.extend(verdict.accepted + [verdict.bonus])
            draft.rewind(lane, len(seq.tokens))
            yield verdict.accepted
    finally:
        if lane is not None:
            lanes.shut(lane)


def decode_tree(seq, draft, target, lanes, bufs, width=3, k=3):
    """Several drafts for one sequence, the best of them wins."""
    while not seq.done:
        opened = []
        for _ in range(width):
            try:
                opened.append(lanes.open(len(seq.tokens)))  # leak: the lane in winner is shut only when something was accepted
            except LanesExhausted:
                break
        if not opened:
            yield []
            continue
        buf = bufs.lend()  # clean: near miss, None falls back to a fresh tensor and the same test guards restore
        scratch = buf if buf is not None else torch.empty(8, target.vocab, device=target.device)
        best, winner = Verdict([], None), opened[0]
        for lane in opened:
            draft.prefill(lane, seq.tokens)
            verdict = verify_quietly(target, seq, propose(draft, lane, seq.tokens[-1], k), scratch)
            if verdict is not None and len(verdict.accepted) > len(best.accepted):
                best, winner = verdict, lane
        if buf is not None:
            bufs.restore(buf)
        for lane in opened:
            if lane != winner:
                lanes.shut(lane)
        if not best.accepted:
            seq.extend([target.greedy(seq)])
            continue
        seq.extend(best.accepted + [best.bonus])
        lanes.shut(winner)
        yield best.accepted


def verify_quietly(target, seq, prop, buf):
    try:
        return verify(target, seq, prop, buf)
    except VerifyMismatch:
        return None


class DraftSession:
    """A lane that outlives single requests of one conversation."""

    def __init__(self, lanes, bufs, prefix):
        self.lanes = lanes
        self.bufs = bufs
        self.lane = lanes.open(len(prefix))  # clean: near miss, belongs to the session, whose close() shuts it
        self.buf = bufs.lend()  # leak: close() shuts the lane and does not restore the buffer
        self.turns = 0

    def turn(self, seq, draft, target):
        if self.buf is None:
            return []
        self.turns += 1
        prop = propose(draft, self.lane, seq.tokens[-1], 4)
        verdict = verify_quietly(target, seq, prop, self.buf)
        return verdict.accepted if verdict else []

    def close(self):
        if self.lane is not None:
            self.lanes.shut(self.lane)
            self.lane = None
        LOG.info("session closed after %d turns", self.turns)


class Engine:
    def __init__(self, draft, target, lanes, bufs):
        self.draft, self.target = draft, target
        self.lanes, self.bufs = lanes, bufs
        self.gens = {}
        self.sessions = {}

    def submit(self, seq):
        self.gens[seq.id] = decode(seq, self.draft, self.target, self.lanes, self.bufs)

    def step(self):
        out = {}
        for sid, gen in list(self.gens.items()):
            try:
                out[sid] = next(gen)
            except StopIteration:
                del self.gens[sid]
            except LanesExhausted:
                LOG.debug("%s waits for a lane", sid)
                del self.gens[sid]
        return out

    def cancel(self, sid):
        gen = self.gens.pop(sid, None)
        if gen is not None:
            gen.close()

    def session(self, cid, prefix):
        known = self.sessions.get(cid)
        if known is not None and known.turns < 50:
            return known
        fresh = DraftSession(self.lanes, self.bufs, prefix)  # leak: a worn out session is replaced in the table and not closed
        self.sessions[cid] = fresh
        return fresh

    def end_session(self, cid):
        session = self.sessions.pop(cid, None)
        if session is not None:
            session.close()

    def acceptance(self, seqs):
        """A rough rate on held-out text, used when k is tuned."""
        hits = total = 0
        for seq in seqs:
            with self.lanes.opened(len(seq.tokens)) as lane:  # clean: shut by the context manager
                self.draft.prefill(lane, seq.tokens)
                buf = self.bufs.lend()  # clean: restored before either outcome is looked at
                if buf is None:
                    continue
                verdict = verify_quietly(self.target, seq, propose(self.draft, lane, seq.tokens[-1], 4), buf)
                self.bufs.restore(buf)
                if verdict is None:
                    continue
                hits += len(verdict.accepted)
                total += 4
        return hits / max(total, 1)

    def shutdown(self):
        for sid in list(self.gens):
            self.cancel(sid)
        for cid in list(self.sessions):
            self.end_session(cid)


def warmup(draft, lanes, prompts):
    """Prefills one lane per prompt so that kernels are compiled."""
    held = []
    for p in prompts:
        if len(p) > lanes.depth:
            continue
        held.append(lanes.open(len(p)))  # leak: LanesExhausted for a later prompt leaves with the lanes of the earlier ones
        draft.prefill(held[-1], p)
    for lane in held:
        lanes.shut(lane)
