"""Worker side: posts the transfers and polls them between steps."""
from __future__ import annotations

import logging
from collections import defaultdict

from .agent import AgentError, State, TransferAgent, Xfer
from .regions import Region, RegionTable
from .scheduler import Request

logger = logging.getLogger(__name__)


class ConnectorWorker:
    def __init__(self, agent: TransferAgent, regions: RegionTable) -> None:
        self.agent = agent
        self.regions = regions
        self.recving: dict[str, list[Xfer]] = defaultdict(list)
        self.sending: dict[str, Xfer] = {}
        self.probes: dict[int, Xfer] = {}

    def start_load(self, request: Request) -> bool:
        try:
            xfer = self.agent.make_xfer(request.regions)  # clean: appended to recving, get_finished() releases it
        except AgentError:
            return False
        self.recving[request.request_id].append(xfer)
        return True

    def get_finished(self) -> set[str]:
        done: set[str] = set()
        for request_id, xfers in list(self.recving.items()):
            left = []
            for xfer in xfers:
                if self.agent.check(xfer) is State.POSTED:
                    left.append(xfer)
                else:
                    self.agent.release_xfer(xfer)
            if left:
                self.recving[request_id] = left
            else:
                del self.recving[request_id]
                done.add(request_id)
        return done

    def start_send(self, request: Request) -> None:
        xfer = self.agent.post_or_wait(request.regions)  # leak: a transfer that ended in error is deleted from sending unreleased
        if xfer is None:
            return
        self.sending[request.request_id] = xfer

    def get_sent(self) -> set[str]:
        sent = set()
        for request_id in list(self.sending):
            xfer = self.sending[request_id]
            state = self.agent.check(xfer)
            if state is State.ERROR:
                logger.error("send of %s failed", request_id)
                del self.sending[request_id]
                continue
            if state is State.DONE:
                self.agent.release_xfer(self.sending.pop(request_id))
                sent.add(request_id)
        return sent

    def probe(self, region: Region) -> bool:
        """Read one region synchronously."""
        xfer = self.agent.post_with_retry([region])  # clean: None-checked, released after polling
        if xfer is None:
            return False
        while self.agent.check(xfer) is State.POSTED:
            pass
        ok = xfer.state is State.DONE
        self.agent.release_xfer(xfer)
        return ok

    def heartbeat(self, peer: int, region: Region) -> None:
        old = self.probes.pop(peer, None)
        if old is not None:
            self.agent.release_xfer(old)
        self.probes[peer] = self.agent.make_xfer([region])  # clean: near miss, the one before was released, shutdown() takes the last

    def handshake(self, peers: list[int]) -> dict[int, bool]:
        result = {}
        for peer in peers:
            region = self.regions.claim()  # leak: an agent without handles is survived by the continue, the region is not unclaimed
            try:
                xfer = self.agent.make_xfer([region])  # clean: released at the end of the round
            except AgentError as exc:
                logger.warning("peer %d: %s", peer, exc)
                result[peer] = False
                continue
            self.agent.check(xfer)
            result[peer] = self.agent.check(xfer) is State.DONE
            self.agent.release_xfer(xfer)
            self.regions.unclaim(region)
        return result

    def copy_region(self, src: Region) -> bool:
        dst = self.regions.claim()  # clean: unclaimed in the finally
        try:
            xfer = self.agent.make_xfer([src, dst])  # clean: near miss, None of the returns in the try misses the release
            if self.agent.check(xfer) is State.ERROR:
                self.agent.release_xfer(xfer)
                return False
            self.agent.release_xfer(xfer)
            return True
        finally:
            self.regions.unclaim(dst)

    def shutdown(self) -> None:
        for xfers in self.recving.values():
            for xfer in xfers:
                self.agent.release_xfer(xfer)
        self.recving.clear()
        for table in (self.sending, self.probes):
            while table:
                self.agent.release_xfer(table.popitem()[1])
