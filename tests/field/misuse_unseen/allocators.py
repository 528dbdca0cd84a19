"""Parts given back twice, counts never taken, and the wrong allocator. In our own words after the reports."""

import logging

logger = logging.getLogger(__name__)


def free_segments(page_allocator, request):
    """After SGLang PR 38941: what is freed as the tail is freed again with all of it."""
    pages = page_allocator.alloc_pages(request.pages)
    tail = pages[request.cached :]
    page_allocator.free_pages(tail)
    page_allocator.free_pages(pages)


def free_segments_fixed(page_allocator, request):
    pages = page_allocator.alloc_pages(request.pages)
    tail = pages[request.cached :]
    page_allocator.free_pages(pages[: request.cached])
    page_allocator.free_pages(tail)


def offload_prefix(kv_allocator, attention, request):
    """After SGLang PR 24063: slots are freed at the first offload, and attended to afterwards."""
    slots = kv_allocator.alloc(request.length)
    attention.write(slots, request.prompt)
    kv_allocator.free(slots)
    for _ in range(request.steps):
        attention.read(slots)


def offload_prefix_at_the_end(kv_allocator, attention, request):
    slots = kv_allocator.alloc(request.length)
    attention.write(slots, request.prompt)
    for _ in range(request.steps):
        attention.read(slots)
    kv_allocator.free(slots)
    logger.info("freed %d slots", len(slots))


class RadixTree:
    def __init__(self):
        self.protected = {}

    def inc_lock_ref(self, node):
        self.protected[node] = self.protected.get(node, 0) + 1

    def dec_lock_ref(self, node):
        self.protected[node] -= 1


def schedule(tree: RadixTree, request, budget):
    """After SGLang issue 24153: a request that was never admitted unlocks the node that it never locked."""
    node = request.last_node
    admitted = request.length <= budget
    if admitted:
        tree.inc_lock_ref(node)
        request.run()
    tree.dec_lock_ref(node)


def schedule_fixed(tree: RadixTree, request, budget):
    node = request.last_node
    admitted = request.length <= budget
    if admitted:
        tree.inc_lock_ref(node)
        request.run()
        tree.dec_lock_ref(node)


class HostCache:
    """After SGLang PR 22767: the entry's pool shares the anchor's indices, and is given them back as well."""

    def __init__(self, anchor_allocator, entry_allocator):
        self.anchor_allocator = anchor_allocator
        self.entry_allocator = entry_allocator

    def write_back(self, device, count):
        indices = self.anchor_allocator.alloc(count)
        device.copy_to_host(indices)
        self.entry_allocator.free(indices)
        self.anchor_allocator.free(indices)

    def write_back_fixed(self, device, count):
        indices = self.anchor_allocator.alloc(count)
        device.copy_to_host(indices)
        self.anchor_allocator.free(indices)

    def write_back_to_both(self, device, count):
        anchors = self.anchor_allocator.alloc(count)
        entries = self.entry_allocator.alloc(count)
        device.copy_to_host(anchors, entries)
        self.entry_allocator.free(entries)
        self.anchor_allocator.free(anchors)


class Offloader:
    """After TensorRT-LLM PR 12834: asked after the swap, the block goes to the other queue."""

    def __init__(self, primary_block_pool, secondary_block_pool):
        self.primary_block_pool = primary_block_pool
        self.secondary_block_pool = secondary_block_pool

    def offload(self, copy):
        block = self.primary_block_pool.acquire()
        copy(block)
        self.secondary_block_pool.release(block)

    def offload_fixed(self, copy):
        block = self.primary_block_pool.acquire()
        copy(block)
        self.primary_block_pool.release(block)
