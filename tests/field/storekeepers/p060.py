import asyncio


class TransferHandle:
    def __init__(self, engine, serial):
        self.engine = engine
        self.serial = serial
        self.bytes = 0

    def release(self):
        self.engine.outstanding.discard(self.serial)


class TransferEngine:
    def __init__(self):
        self.outstanding = set()
        self.serial = 0

    def register(self):
        self.serial += 1
        self.outstanding.add(self.serial)
        return TransferHandle(self, self.serial)


class KvReceiver:
    def __init__(self, engine):
        self.engine = engine
        self.receiving = {}
        self.ready = {}
        self.failed = {}

    def expect(self, rid, peer):
        if rid in self.receiving or rid in self.ready:
            return None
        handle = self.engine.register()  # leak: on_error moves it to failed, and report clears that
        self.receiving[rid] = (peer, handle)
        return handle.serial

    def on_chunk(self, rid, size, last):
        if rid not in self.receiving:
            return
        _, handle = self.receiving[rid]
        handle.bytes += size
        if last:
            del self.receiving[rid]
            self.ready[rid] = handle

    def on_error(self, rid, code):
        entry = self.receiving.pop(rid, None)
        if entry is not None:
            self.failed[rid] = (code, entry[1])

    def report(self):
        summary = {rid: code for rid, (code, _) in self.failed.items()}
        self.failed.clear()
        return summary

    async def decode(self, rid, model):
        while rid not in self.ready:
            await asyncio.sleep(0.01)
        handle = self.ready.pop(rid)
        text = await model(handle.serial, handle.bytes)
        handle.release()
        return text


class KvSender:
    def __init__(self, engine):
        self.engine = engine
        self.peers = {}
        self.metadata = engine.register()  # clean: close releases it

    def connect(self, peer):
        if peer in self.peers:
            self.peers[peer].release()
        self.peers[peer] = self.engine.register()  # clean: released before it is replaced and in close

    async def send(self, rid, write):
        handle = self.engine.register()  # clean: released in finally
        try:
            return await write(rid, handle.serial, self.metadata.serial)
        finally:
            handle.release()

    def close(self):
        for handle in self.peers.values():
            handle.release()
        self.peers.clear()
        self.metadata.release()
