"""Scheduler side: which requests need remote KV, and the regions for them."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .regions import Region, RegionsExhausted, RegionTable

logger = logging.getLogger(__name__)


@dataclass
class Request:
    request_id: str
    nbytes: int
    remote: bool = True
    regions: list[Region] = field(default_factory=list)
    extra: list[Region] = field(default_factory=list)


class ConnectorScheduler:
    def __init__(self, regions: RegionTable) -> None:
        self.regions = regions
        self.to_recv: dict[str, Request] = {}
        self.to_send: dict[str, list[Region]] = {}
        self.reserved: dict[str, list[Region]] = {}

    def update_after_alloc(self, request: Request) -> bool:
        if not request.remote or request.regions:
            return True
        try:
            request.regions = self.regions.claim_span(request.nbytes)  # clean: near miss, moved into the request, finished() unclaims them
        except RegionsExhausted:
            return False
        self.to_recv[request.request_id] = request
        return True

    def finished(self, request: Request) -> None:
        self.to_recv.pop(request.request_id, None)
        for region in request.regions + request.extra:
            self.regions.unclaim(region)
        request.regions = []
        request.extra = []

    def preempt(self, request: Request) -> None:
        """Back to the waiting queue; the KV will be pulled again."""
        self.finished(request)

    def publish(self, request: Request) -> None:
        """A finished prefill keeps its regions until the decoder has read them."""
        if request.request_id in self.to_send:
            return
        for region in request.regions:
            self.regions.share(region)  # clean: near miss, the send entry holds the extra claims until sent()
        self.to_send[request.request_id] = list(request.regions)

    def sent(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            for region in self.to_send.pop(request_id, ()):
                self.regions.unclaim(region)

    def reserve(self, request: Request) -> int:
        """Early reservation for a request that is still in the queue."""
        span = self.regions.claim_upto(request.nbytes)  # leak: a span that is too short returns without the unclaim
        if len(span) * self.regions.length < request.nbytes:
            logger.debug("only %d regions for %s", len(span), request.request_id)
            return 0
        self.reserved[request.request_id] = span
        return len(span)

    def take_reservation(self, request: Request) -> bool:
        span = self.reserved.pop(request.request_id, None)
        if span is None:
            return False
        if request.regions:
            for region in span:
                self.regions.unclaim(region)
            return True
        request.regions = span
        return True

    def headroom(self, nbytes: int) -> int:
        span = self.regions.claim_upto(nbytes)  # clean: every region is unclaimed after the count
        got = sum(r.length for r in span)
        for region in span:
            self.regions.unclaim(region)
        return got

    def regrow(self, request: Request, nbytes: int) -> bool:
        try:
            request.extra = self.regions.claim_span(nbytes)  # leak: a second regrow replaces the list while the first is claimed
        except RegionsExhausted:
            return False
        request.nbytes = nbytes
        return True

    def regrow_all(self, requests: list[Request], factor: int) -> int:
        grown = 0
        for request in requests:
            while request.nbytes < factor * self.regions.length:
                if not self.regrow(request, request.nbytes * 2):  # clean: the regions are the request's
                    break
                grown += 1
        return grown
