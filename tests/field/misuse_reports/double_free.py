"""Things given back twice. Written in our own words after the bug reports that each function names."""

import threading

import torch


class PagedAllocator:
    """Hands out pages and takes whatever it is given back, twice if it must."""

    def __init__(self, pages):
        self.free_pages = list(pages)

    def allocate(self):
        return self.free_pages.pop()

    def free(self, page):
        self.free_pages.append(page)


def restore_chunk(allocator: PagedAllocator, backend, key):
    """After LMCache issue 5005: the error path frees and so does the common one."""
    page = allocator.allocate()
    try:
        backend.read_into(page, key)
    except OSError:
        allocator.free(page)
        backend.forget(key)
    allocator.free(page)


def restore_chunk_fixed(allocator: PagedAllocator, backend, key):
    page = allocator.allocate()
    try:
        backend.read_into(page, key)
    except OSError:
        allocator.free(page)
        backend.forget(key)
        return False
    allocator.free(page)
    return True


class MemoryObject:
    """Counted by hand, as cache engines count their chunks."""

    def __init__(self, allocator, page):
        self.allocator, self.page, self.count = allocator, page, 1

    def ref_count_up(self):
        self.count += 1

    def ref_count_down(self):
        self.count -= 1
        if self.count <= 0:
            self.allocator.free(self.page)


def store(manager, backends, key, payload):
    """After LMCache issue 1365: each backend gives its own reference back, the loop gives back one more."""
    memory_object = manager.allocate_object(payload.shape)
    memory_object.copy_from(payload)
    for backend in backends:
        memory_object.ref_count_up()
        backend.submit_put(key, memory_object)
    memory_object.ref_count_down()
    memory_object.ref_count_down()


def prefetch_done(manager, tiers, wanted):
    """After LMCache PR 2724: what no later tier needs is released twice, here and by the sweep over all."""
    objects = [manager.allocate_object(tier.shape) for tier in tiers]
    for memory_object in objects[wanted:]:
        memory_object.ref_count_down()
    for memory_object in objects:
        memory_object.ref_count_down()


def prefetch_done_fixed(manager, tiers, wanted):
    objects = [manager.allocate_object(tier.shape) for tier in tiers]
    for memory_object in objects[wanted:]:
        memory_object.ref_count_down()
    for memory_object in objects[:wanted]:
        memory_object.ref_count_down()


def drop_unused(manager, key, used):
    """After LMCache PR 2772: an unused object goes back at once and again with all the others."""
    memory_object = manager.allocate_object(key.shape)
    if not used:
        memory_object.ref_count_down()
    manager.unpin(key)
    memory_object.ref_count_down()


def drop_unused_fixed(manager, key, used):
    memory_object = manager.allocate_object(key.shape)
    if not used:
        memory_object.ref_count_down()
    manager.unpin(key)
    if used:
        memory_object.ref_count_down()


class Scheduler:
    """After vLLM PR 33377: an aborted request is freed at the abort and again when its transfer reports."""

    def __init__(self, kv_cache_manager, connector):
        self.kv_cache_manager = kv_cache_manager
        self.connector = connector

    def abort_then_report(self, request, finished_sending):
        blocks = self.kv_cache_manager.allocate_blocks(request.num_tokens)
        self.connector.send(request, blocks)
        if request.aborted:
            self.kv_cache_manager.free_blocks(blocks)
        if request.request_id in finished_sending:
            self.kv_cache_manager.free_blocks(blocks)

    def abort_or_report(self, request, finished_sending):
        blocks = self.kv_cache_manager.allocate_blocks(request.num_tokens)
        self.connector.send(request, blocks)
        if request.aborted:
            self.kv_cache_manager.free_blocks(blocks)
        elif request.request_id in finished_sending:
            self.kv_cache_manager.free_blocks(blocks)
        else:
            self.connector.keep(request, blocks)


def preempt(token_to_kv_pool_allocator, tree_cache, request):
    """After SGLang PR 18694: a request that finished in this step was freed, preemption frees it again."""
    indices = token_to_kv_pool_allocator.alloc(request.length)
    if request.step(indices):
        tree_cache.log_finished(request)
        token_to_kv_pool_allocator.free(indices)
    if request.must_retract:
        token_to_kv_pool_allocator.free(indices)


def finish(token_to_kv_pool_allocator, request, overlap):
    """After SGLang-JAX PR 982: the slot of the last token is part of the row, and is freed once more by itself."""
    row = token_to_kv_pool_allocator.alloc(request.length)
    last = row[-1:]
    request.run(row)
    token_to_kv_pool_allocator.free(row)
    if overlap:
        token_to_kv_pool_allocator.free(last)


class SlidingWindowBlocks:
    """After vLLM PR 3347: a shared block is let go when it is replaced, and again with the old table."""

    def __init__(self, gpu_allocator):
        self.gpu_allocator = gpu_allocator

    def append_then_free(self, sequence):
        block = self.gpu_allocator.allocate()
        table = [block]
        if sequence.shares_last_block:
            self.gpu_allocator.free(block)
        for each in table:
            self.gpu_allocator.free(each)

    def append_then_free_fixed(self, sequence):
        block = self.gpu_allocator.allocate()
        table = [block]
        if sequence.shares_last_block:
            self.gpu_allocator.free(block)
            table[-1] = self.gpu_allocator.allocate()
        for each in table:
            self.gpu_allocator.free(each)


class Handler:
    """After Diamond PR 199: released by hand in the body, and by the finally once more."""

    def __init__(self):
        self.lock = threading.Lock()

    def flush(self, batch):
        self.lock.acquire()
        try:
            for metric in batch:
                self.send(metric)
            self.lock.release()
        finally:
            self.lock.release()

    def flush_fixed(self, batch):
        self.lock.acquire()
        try:
            for metric in batch:
                self.send(metric)
        finally:
            self.lock.release()

    def pause(self, batch):
        self.lock.acquire()
        try:
            self.lock.release()
            try:
                self.wait(batch)
            finally:
                self.lock.acquire()
        finally:
            self.lock.release()


class PooledResponse:
    """After requests issue 2636: the connection goes back when the answer is there, and when it is read."""

    def fetch(self, connection_pool, request):
        connection = connection_pool.get_conn()
        connection.send(request)
        answer = connection.getresponse()
        connection_pool.put_conn(connection)
        body = answer.read()
        if answer.isclosed():
            connection_pool.put_conn(connection)
        return body

    def fetch_fixed(self, connection_pool, request):
        connection = connection_pool.get_conn()
        connection.send(request)
        body = connection.getresponse().read()
        connection_pool.put_conn(connection)
        return body


class Database:
    """After aiomysql issue 595: taken once in __init__, given back by every query."""

    def __init__(self, connection_pool):
        self.connection_pool = connection_pool
        self.connection = connection_pool.get_conn()

    def execute(self, query, values):
        self.connection.run(query, values)
        self.connection_pool.put_conn(self.connection)

    def report(self):
        self.execute("select a", ())
        self.execute("select b", ())


class ClosingResource:
    """After 1space PR 46: close() gives the permit back, and so does the destructor."""

    def __init__(self, semaphore):
        self.semaphore = semaphore
        self.semaphore.acquire()

    def close(self):
        self.semaphore.release()

    def __del__(self):
        self.semaphore.release()


class ClosingResourceFixed:
    def __init__(self, semaphore):
        self.semaphore = semaphore
        self.semaphore.acquire()
        self.held = True

    def close(self):
        if self.held:
            self.held = False
            self.semaphore.release()

    def __del__(self):
        if self.held:
            self.held = False
            self.semaphore.release()


def elementwise(l1_pool, x, scale):
    """After tt-metal issue 57458: a temporary goes back by name and again in the loop over all temporaries."""
    gated = l1_pool.allocate(x.shape)
    torch.mul(x, scale, out=gated)
    result = gated.sum()
    l1_pool.deallocate(gated)
    for temporary in (gated,):
        l1_pool.deallocate(temporary)
    return result
