"""Paged KV cache: page allocator, prefix sharing, beam forks, swapping."""
import logging
from collections import OrderedDict, deque

logger = logging.getLogger("kv")


class PageAllocator:
    def __init__(self, n_pages):
        self.free = deque(range(n_pages))
        self.refs = [0] * n_pages

    def new_page(self):
        if not self.free:
            return None
        p = self.free.popleft()  # clean: counted and returned to the caller
        self.refs[p] = 1
        return p

    def retain(self, p):
        self.refs[p] += 1
        return p

    def drop(self, p):
        self.refs[p] -= 1
        if self.refs[p] == 0:
            self.free.append(p)

    def new_pages(self, n):
        if len(self.free) < n:
            return None
        return [self.new_page() for _ in range(n)]  # clean: count checked first, list goes to the caller

    def new_aligned(self, n):
        """Pages of one 2 MiB frame, for the fused kernel."""
        got = []
        for _ in range(n):
            p = self.new_page()  # leak: pages of a different frame are dropped when the frame does not match
            if p is None:
                break
            if got and p // 16 != got[0] // 16:
                continue
            got.append(p)
        if len(got) == n:
            return got
        for p in got:
            self.drop(p)
        return None


class Sequence:
    def __init__(self, sid, tokens):
        self.sid = sid
        self.tokens = list(tokens)
        self.table = []
        self.finished = False


class KVManager:
    PAGE = 16

    def __init__(self, alloc, k_cache, v_cache):
        self.alloc = alloc
        self.k = k_cache
        self.v = v_cache
        self.seqs = {}
        self.prefixes = OrderedDict()   # hash -> page
        self.swapped = {}

    def _need(self, n_tokens):
        return (n_tokens + self.PAGE - 1) // self.PAGE

    def admit(self, seq):
        pages = self.alloc.new_pages(self._need(len(seq.tokens)))  # clean: near miss, moved into seq.table, dropped by retire
        if pages is None:
            return False
        seq.table.extend(pages)
        self.seqs[seq.sid] = seq
        return True

    def admit_prefix(self, seq, hashes):
        """Shares cached pages, allocates the rest."""
        shared = [self.alloc.retain(self.prefixes[h]) for h in hashes if h in self.prefixes]  # leak: retained pages stay counted when the rest cannot be allocated
        rest = self._need(len(seq.tokens)) - len(shared)
        fresh = self.alloc.new_pages(rest)  # clean: moved into seq.table
        if fresh is None:
            return False
        seq.table = shared + fresh
        self.seqs[seq.sid] = seq
        return True

    def admit_shared(self, seq, h):
        page = self.prefixes.get(h)
        if page is None:
            return self.admit(seq)
        self.alloc.retain(page)  # clean: near miss, dropped again on failure, else in seq.table
        fresh = self.alloc.new_pages(self._need(len(seq.tokens)) - 1)  # clean: None-checked, moved into seq.table
        if fresh is None:
            self.alloc.drop(page)
            return False
        seq.table = [page, *fresh]
        self.seqs[seq.sid] = seq
        return True

    def retire(self, sid):
        seq = self.seqs.pop(sid, None)
        if seq is None:
            return
        for p in seq.table:
            self.alloc.drop(p)
        seq.table = []
        seq.finished = True

    def append_token(self, seq, tok):
        seq.tokens.append(tok)
        if self._need(len(seq.tokens)) > len(seq.table):
            p = self.alloc.new_page()  # clean: moved into seq.table
            if p is None:
                seq.tokens.pop()
                return False
            seq.table.append(p)
        return True

    def speculate(self, seq, drafts, verify):
        extra = self._need(len(seq.tokens) + len(drafts)) - len(seq.table)
        pages = self.alloc.new_pages(max(0, extra))  # leak: pages are not dropped when no draft is accepted
        if pages is None:
            return 0
        accepted = verify(seq.tokens, drafts, seq.table + pages)
        if accepted == 0:
            return 0
        seq.tokens.extend(drafts[:accepted])
        keep = self._need(len(seq.tokens)) - len(seq.table)
        seq.table.extend(pages[:max(0, keep)])
        for p in pages[max(0, keep):]:
            self.alloc.drop(p)
        return accepted

    def fork(self, seq, sid):
        child = Sequence(sid, seq.tokens)
        for p in seq.table:
            child.table.append(self.alloc.retain(p))  # clean: counted in the child's table, dropped by retire
        self.seqs[sid] = child
        return child

    def make_private(self, seq, i):
        """Copy on write of page i."""
        old = seq.table[i]
        if self.alloc.refs[old] == 1:
            return True
        new = self.alloc.new_page()  # clean: near miss, replaces the old page, whose reference is dropped
        if new is None:
            return False
        self.k[new].copy_(self.k[old])
        self.v[new].copy_(self.v[old])
        seq.table[i] = new
        self.alloc.drop(old)
        return True

    def beam_step(self, seq, parents, width):
        children = []
        for b in range(width):
            child = Sequence((seq.sid, b), seq.tokens)
            child.table = [self.alloc.retain(p) for p in seq.table]  # leak: a child whose parent was pruned is skipped with its references
            if parents[b] < 0:
                continue
            self.seqs[child.sid] = child
            children.append(child)
        return children

    def publish_prefix(self, h, page):
        if h in self.prefixes:
            self.prefixes.move_to_end(h)
            return
        self.prefixes[h] = self.alloc.retain(page)  # clean: near miss, held by self.prefixes, evicted below and by flush
        while len(self.prefixes) > 1024:
            _, old = self.prefixes.popitem(last=False)
            self.alloc.drop(old)

    def flush(self):
        while self.prefixes:
            self.alloc.drop(self.prefixes.popitem()[1])

    def swap_out(self, sid):
        seq = self.seqs[sid]
        self.swapped[sid] = (seq, self.k[seq.table].cpu(), self.v[seq.table].cpu())
        self.retire(sid)

    def swap_in_many(self, sids):
        done = 0
        for sid in sids:
            seq, k, v = self.swapped[sid]
            pages = self.alloc.new_pages(len(k))  # leak: a cancelled sequence is removed without dropping its new pages
            if pages is None:
                break
            if len(seq.tokens) == 0:
                del self.swapped[sid]
                continue
            self.k[pages] = k.to(self.k.device)
            self.v[pages] = v.to(self.v.device)
            seq.table = pages
            self.seqs[sid] = self.swapped.pop(sid)[0]
            done += 1
        return done

    def score_pair(self, a, b, model):
        pa = self.alloc.new_pages(self._need(len(a)))  # clean: dropped when the second is refused and at the end
        if pa is None:
            return None
        pb = self.alloc.new_pages(self._need(len(b)))  # leak: only the first half of the pair is dropped at the end
        if pb is None:
            for p in pa:
                self.alloc.drop(p)
            return None
        out = model.loglik(a, pa) - model.loglik(b, pb)
        for p in pa:
            self.alloc.drop(p)
        logger.debug("pair %.3f", out)
        return out
