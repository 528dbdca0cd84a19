"""Paged key/value cache of a decode server: page numbers with reference counts."""
from dataclasses import dataclass, field


class PageTable:
    def __init__(self, count):
        self._refs = [0] * count
        self._free = list(range(count - 1, -1, -1))

    def __len__(self):
        return len(self._free)

    def new_page(self):
        """A page number with one reference, or None."""
        if not self._free:
            return None
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def share(self, page):
        self._refs[page] += 1
        return page

    def unref(self, page):
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)

    def refs(self, page):
        return self._refs[page]


@dataclass(eq=False)
class Sequence:
    tokens: list
    pages: list = field(default_factory=list)
    parent: object = None


class Scheduler:
    def __init__(self, table, model, page_size=16):
        self.table = table
        self.model = model
        self.page_size = page_size
        self.running = []
        self.prefix = {}

    def admit(self, tokens):
        """A sequence with pages for its prompt, the shared prefix taken over from the prefix map."""
        need = -(-len(tokens) // self.page_size)
        pages = []
        for i in range(need):
            key = tuple(tokens[:(i + 1) * self.page_size])
            if (known := self.prefix.get(key)) is None:
                break
            pages.append(self.table.share(known))  # clean: near miss, in pages, unref'd on refusal or by finish
        while len(pages) < need:
            page = self.table.new_page()  # clean: near miss, in pages, unref'd on refusal or by finish
            if page is None:
                while pages:
                    self.table.unref(pages.pop())
                return None
            pages.append(page)
        seq = Sequence(list(tokens), pages)
        self.running.append(seq)
        self.model.prefill(seq.tokens, seq.pages)
        return seq

    def publish(self, seq):
        """Make the full pages of a sequence known to later prompts; a page known already is left."""
        for i, page in enumerate(seq.pages[:len(seq.tokens) // self.page_size]):
            key = tuple(seq.tokens[:(i + 1) * self.page_size])
            held = self.table.share(page)  # leak: when the key is known already the reference is not undone
            if key in self.prefix:
                continue
            self.prefix[key] = held

    def evict_prefix(self, want):
        freed = 0
        for key in sorted(self.prefix, key=len, reverse=True):
            if freed >= want:
                break
            page = self.prefix.pop(key)
            self.table.unref(page)
            freed += self.table.refs(page) == 0
        return freed

    def finish(self, seq):
        self.running.remove(seq)
        for page in seq.pages:
            self.table.unref(page)
        seq.pages.clear()

    def fork(self, seq, count):
        """Beams of a sequence: full pages shared, the open last page copied for each beam."""
        beams = []
        for _ in range(count):
            open_page = self.table.new_page()  # clean: near miss, the beam's last page, ended by finish
            if open_page is None:
                break
            pages = [self.table.share(p) for p in seq.pages[:-1]]  # clean: near miss, beam's pages, ended by finish
            self.model.copy_page(seq.pages[-1], open_page)
            beam = Sequence(list(seq.tokens), pages + [open_page], parent=seq)
            beams.append(beam)
        self.running.extend(beams)
        return beams

    def step(self):
        """One decode step for all that run; sequences that get no page are put off."""
        ready, waiting, done = [], [], []
        order = sorted(self.running, key=lambda s: (s.parent is not None, len(s.tokens)))
        asked = 0
        for seq in order:
            if seq.tokens and seq.tokens[-1] == self.model.eos:
                done.append(seq)
                continue
            if len(seq.tokens) % self.page_size:
                ready.append(seq)
                continue
            asked += 1
            page = self.table.new_page()  # clean: near miss, appended to the sequence, None is put off
            if page is None and self.evict_prefix(1):
                page = self.table.new_page()  # clean: near miss, as above
            if page is None:
                waiting.append(seq)
                continue
            seq.pages.append(page)
            ready.append(seq)
        probe = self.table.new_page() if asked and self.model.measure else None  # clean: near miss, same None check below
        if ready:
            batch = [(s.tokens, s.pages) for s in ready]
            if probe is not None:
                self.model.copy_page(ready[0].pages[-1], probe)
            for seq, token in zip(ready, self.model.decode(batch)):
                seq.tokens.append(token)
                if token == self.model.eos:
                    done.append(seq)
            if probe is not None:
                self.model.record_drift(ready[0].pages[-1], probe)
        if probe is not None:
            self.table.unref(probe)
        for seq in done:
            if len(seq.tokens) >= 4 * self.page_size:
                self.publish(seq)
            self.finish(seq)
        waiting.sort(key=lambda s: len(s.pages), reverse=True)
        return waiting

    def unshare(self, seq, index):
        """Give a sequence its own copy of a page that others read as well."""
        old = seq.pages[index]
        if self.table.refs(old) == 1:
            return old
        own = self.table.new_page()  # clean: near miss, put in place of the old page, which is unref'd
        if own is None:
            return None
        self.model.copy_page(old, own)
        seq.pages[index] = own
        self.table.unref(old)
        return own

    def verify_draft(self, seq, draft):
        """Score draft tokens in scratch pages; keep the pages that hold accepted tokens only."""
        base = len(seq.tokens)
        need = -(-(base + len(draft)) // self.page_size) - len(seq.pages)
        scratch = []
        for _ in range(need):
            page = self.table.new_page()  # leak: the pages past the accepted tokens are dropped with the list
            if page is None:
                for taken in scratch:
                    self.table.unref(taken)
                return 0
            scratch.append(page)
        guard = [self.table.share(p) for p in seq.pages]  # leak: return on a full reject before the unref loop
        accepted = self.model.verify(seq.tokens, draft, seq.pages + scratch)
        if accepted == 0:
            for page in scratch:
                self.table.unref(page)
            return 0
        seq.tokens.extend(draft[:accepted])
        keep = -(-len(seq.tokens) // self.page_size) - len(seq.pages)
        seq.pages.extend(scratch[:keep])
        for page in guard:
            self.table.unref(page)
        return accepted

    def score_prompts(self, prompts):
        """Log-likelihood of short prompts, each in one page of its own."""
        scores = {}
        for name, tokens in prompts.items():
            if (page := self.table.new_page()) is None:  # leak: a prompt over one page is skipped with the page held
                scores[name] = None
                continue
            if len(tokens) > self.page_size:
                scores[name] = None
                continue
            scores[name] = self.model.prefill(tokens, [page]).sum()
            self.table.unref(page)
        return scores
