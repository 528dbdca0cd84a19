"""Blocks, slots and reference counts given back twice. In our own words after the reports that each names."""

import logging

logger = logging.getLogger(__name__)


class WindowedTable:
    """After vLLM issue 42571: a block that comes into the window again stands in the list twice."""

    def __init__(self, block_allocator):
        self.block_allocator = block_allocator

    def offload(self, request):
        block = self.block_allocator.allocate()
        request.write(block)
        offloaded = [block]
        if request.slides:
            offloaded.append(block)
        for each in offloaded:
            self.block_allocator.free(each)

    def offload_unique(self, request):
        block = self.block_allocator.allocate()
        request.write(block)
        offloaded = [block]
        if request.slides:
            offloaded.append(self.block_allocator.allocate())
        for each in offloaded:
            self.block_allocator.free(each)


class PrefillQueue:
    """After SGLang PR 30937: a rejected grammar frees what the end of the transfer frees as well."""

    def __init__(self, kv_allocator, sender):
        self.kv_allocator = kv_allocator
        self.sender = sender

    def run(self, request):
        slots = self.kv_allocator.alloc(request.length)
        self.sender.start(slots)
        try:
            request.grammar.accept(request.token)
        except ValueError as error:
            request.abort(str(error))
            self.kv_allocator.free(slots)
        state = self.sender.wait()
        if state.failed:
            logger.warning("transfer of %s failed", request)
        self.kv_allocator.free(slots)

    def run_deferred(self, request):
        slots = self.kv_allocator.alloc(request.length)
        self.sender.start(slots)
        try:
            request.grammar.accept(request.token)
        except ValueError as error:
            request.abort(str(error))
        self.sender.wait()
        self.kv_allocator.free(slots)

    def run_or_give_up(self, request):
        slots = self.kv_allocator.alloc(request.length)
        try:
            request.grammar.accept(request.token)
        except ValueError as error:
            request.abort(str(error))
            self.kv_allocator.free(slots)
            return None
        self.sender.start(slots)
        self.sender.wait()
        self.kv_allocator.free(slots)
        return request


class PinnedObject:
    def __init__(self, address):
        self.address = address
        self.pins = 0

    def pin(self):
        self.pins += 1

    def unpin(self):
        self.pins -= 1


class Engine:
    """After LMCache PR 5095: the retrieval lets go, and so does the end of the lookup."""

    def __init__(self, manager):
        self.manager = manager

    def retrieve(self, key, target):
        memory_object = self.manager.allocate_object(key.shape)
        self.manager.load(key, memory_object)
        target.copy_from(memory_object.address)
        memory_object.ref_count_down()
        self._end_lookup(memory_object)

    def _end_lookup(self, memory_object):
        memory_object.ref_count_down()

    def retrieve_once(self, key, target):
        memory_object = self.manager.allocate_object(key.shape)
        self.manager.load(key, memory_object)
        target.copy_from(memory_object.address)
        self._end_lookup(memory_object)

    def retrieve_shared(self, key, target):
        memory_object = self.manager.allocate_object(key.shape)
        memory_object.ref_count_up()
        target.copy_from(memory_object.address)
        memory_object.ref_count_down()
        memory_object.ref_count_down()


class BurstLimiter:
    """After LangAlpha PR 132: the handler gives the slot back, and so does what always runs at the end."""

    def __init__(self, slot_allocator):
        self.slot_allocator = slot_allocator

    async def run(self, workflow):
        slot = self.slot_allocator.alloc_slot()
        try:
            return await workflow.start(slot)
        except RuntimeError:
            self.slot_allocator.free_slot(slot)
            await workflow.steer()
            return None
        finally:
            self.slot_allocator.free_slot(slot)

    async def run_owned(self, workflow):
        slot = self.slot_allocator.alloc_slot()
        owned = True
        try:
            return await workflow.start(slot)
        except RuntimeError:
            self.slot_allocator.free_slot(slot)
            owned = False
            await workflow.steer()
            return None
        finally:
            if owned:
                self.slot_allocator.free_slot(slot)


class Handles:
    """After wasmtime-py PR 342: a list of free places that takes the same place twice."""

    def __init__(self):
        self.values = []
        self.next = 0

    def allocate(self, value):
        place = self.next
        if place == len(self.values):
            self.values.append(None)
            self.next += 1
        else:
            self.next = self.values[place]
        self.values[place] = value
        return place

    def deallocate(self, place):
        self.values[place] = self.next
        self.next = place


def call_host(handles: Handles, function, arguments):
    place = handles.allocate(function)
    try:
        result = function(place, *arguments)
    except Exception:
        handles.deallocate(place)
        logger.exception("host function failed")
        result = None
    handles.deallocate(place)
    return result


def call_host_fixed(handles: Handles, function, arguments):
    place = handles.allocate(function)
    try:
        return function(place, *arguments)
    finally:
        handles.deallocate(place)


class Connections:
    """After marie-ai issue 153: what the retry gave back in the handler is given back at the end."""

    def __init__(self, pool):
        self.pool = pool

    def execute(self, statement):
        connection = self.pool.get_conn()
        try:
            return connection.run(statement)
        except ConnectionError:
            logger.warning("retrying")
            self.pool.put_conn(connection, close=True)
        finally:
            self.pool.put_conn(connection)
        return None

    def execute_with_retry(self, statement):
        connection = self.pool.get_conn()
        try:
            return connection.run(statement)
        except ConnectionError:
            self.pool.put_conn(connection, close=True)
            connection = None
        finally:
            if connection is not None:
                self.pool.put_conn(connection)
        return self.execute_with_retry(statement)
