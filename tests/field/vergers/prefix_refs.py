"""Reference counts on the pages of the shared prefix tree."""
import heapq
from collections import Counter
from contextlib import contextmanager


class PageRefs:
    def __init__(self):
        self._count = {}

    def pin(self, page):
        self._count[page] = self._count.get(page, 0) + 1
        return page

    def unpin(self, page):
        left = self._count[page] - 1
        if left:
            self._count[page] = left
        else:
            del self._count[page]

    def evictable(self, pages):
        return [page for page in pages if page not in self._count]


class PromptTooLong(ValueError):
    pass


def run_batch(refs, tree, model, prompts):
    pages = []
    for prompt in prompts:
        pages.extend(refs.pin(page) for page in tree.match(prompt))  # leak: a page shared by two prompts is pinned twice and unpinned once through the set
    try:
        return model.forward(prompts, pages)
    finally:
        for page in set(pages):
            refs.unpin(page)


def score_batch(refs, tree, model, prompts):
    pages = []
    for prompt in prompts:
        for page in tree.match(prompt):
            pages.append(refs.pin(page))  # clean: the counter unpins a page as many times as it was pinned
    try:
        return model.score(prompts, pages)
    finally:
        for page, times in Counter(pages).items():
            for _ in range(times):
                refs.unpin(page)


class BranchTable:
    def __init__(self, refs, parent_pages):
        self.refs = refs
        self.pages = [refs.pin(page) for page in parent_pages]  # leak: write() replaces a shared page by a private copy and the pin on the shared one stays
        self.private = set()

    def write(self, index, copier, value):
        page = self.pages[index]
        if page not in self.private:
            page = copier.duplicate(page)
            self.private.add(page)
            self.pages[index] = page
        copier.store(page, value)

    def close(self):
        for page in self.pages:
            if page not in self.private:
                self.refs.unpin(page)
        self.pages = []


def prefetch_roots(refs, tree, loader, requests):
    held = {request.tenant: refs.pin(tree.root_of(request.model)) for request in requests}  # leak: two requests of one tenant collide on the key and the first pin is overwritten
    try:
        for page in held.values():
            loader.fetch(page)
    finally:
        for page in held.values():
            refs.unpin(page)


class PrefixLookup:
    def __init__(self, refs, tree):
        self.refs = refs
        self.tree = tree

    def _hold(self, page):
        return self.refs.pin(page)  # leak: admit() holds the pages that match() has held already, and finish() unpins each of them once

    def match(self, tokens):
        return [self._hold(page) for page in self.tree.match(tokens)]

    def admit(self, request):
        request.pages = self.match(request.tokens)
        for page in request.pages:
            self._hold(page)
        return len(request.tokens) - len(request.pages) * self.tree.page_size

    def finish(self, request):
        while request.pages:
            self.refs.unpin(request.pages.pop())


class SessionPins:
    def __init__(self, refs):
        self.refs = refs
        self.by_offset = {}

    def hold(self, offset, page):
        if offset not in self.by_offset:
            self.by_offset[offset] = self.refs.pin(page)  # leak: absorb() updates by offset, so a pin at the same offset in both sessions is overwritten

    def absorb(self, other):
        self.by_offset.update(other.by_offset)
        other.by_offset.clear()

    def close(self):
        for page in self.by_offset.values():
            self.refs.unpin(page)
        self.by_offset.clear()


class ChatPins:
    def __init__(self, refs):
        self.refs = refs
        self.heads = {}

    def open(self, chat_id, page):
        if chat_id not in self.heads:
            self.heads[chat_id] = self.refs.pin(page)  # leak: rename() onto an id that is open already throws the pin of that chat away

    def rename(self, old_id, new_id):
        self.heads[new_id] = self.heads.pop(old_id)

    def close(self, chat_id):
        page = self.heads.pop(chat_id, None)
        if page is not None:
            self.refs.unpin(page)


def copy_into_slots(refs, tree, tokens, slots, copier):
    pages = [refs.pin(page) for page in tree.match(tokens)]  # leak: zip stops at the shorter side, so pages beyond the number of slots stay pinned
    copied = 0
    for page, slot in zip(pages, slots):
        try:
            copier.copy(page, slot)
            copied += 1
        finally:
            refs.unpin(page)
    return copied


class BeamFront:
    def __init__(self, refs, width):
        self.refs = refs
        self.width = width
        self.beams = []

    def grow(self, candidates):
        for score, page in candidates:
            self.beams.append((score, self.refs.pin(page)))  # leak: prune() keeps the best few and the pins of the others go with the old list

    def prune(self):
        self.beams = heapq.nlargest(self.width, self.beams)

    def close(self):
        for _, page in self.beams:
            self.refs.unpin(page)
        self.beams = []


class PrefillHandoff:
    def __init__(self, refs):
        self.refs = refs
        self.prefilling = {}
        self.decoding = {}

    def begin(self, rid, page):
        if rid in self.prefilling:
            raise KeyError(rid)
        self.prefilling[rid] = self.refs.pin(page)  # clean: hand_over() unpins the prefill half

    def hand_over(self, rid):
        page = self.prefilling[rid]
        if rid in self.decoding:
            raise KeyError(rid)
        self.decoding[rid] = self.refs.pin(page)  # clean: the second pin on the same page belongs to decode, finish() unpins it
        self.refs.unpin(self.prefilling.pop(rid))

    def finish(self, rid):
        self.refs.unpin(self.decoding.pop(rid))


@contextmanager
def pinned(refs, page):
    refs.pin(page)  # clean: the finally runs although the body below raises
    try:
        yield page
    finally:
        refs.unpin(page)


def truncate_prompt(refs, tree, tokens, limit):
    with pinned(refs, tree.root_of(tokens)) as root:
        if len(tokens) > limit * 4:
            raise PromptTooLong(len(tokens))
        return tree.walk(root, tokens[:limit])


class Admission:
    def __init__(self, refs, tree):
        self.refs = refs
        self.tree = tree

    def _attach(self, request):
        for page in self.tree.match(request.tokens):
            request.pages.append(self.refs.pin(page))  # clean: the raise below leaves the pages on the request, and submit() drops them
        if len(request.tokens) > request.limit:
            raise PromptTooLong(request.rid)

    def submit(self, request, queue):
        try:
            self._attach(request)
        except PromptTooLong:
            self.drop(request)
            return False
        queue.append(request)
        return True

    def drop(self, request):
        while request.pages:
            self.refs.unpin(request.pages.pop())
