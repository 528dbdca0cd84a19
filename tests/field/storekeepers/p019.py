import heapq
import time


class HoldPool:
    def __init__(self, seats):
        self._seats = set(seats)

    def hold(self):
        return self._seats.pop()

    def unhold(self, seat):
        self._seats.add(seat)

    def __len__(self):
        return len(self._seats)


class BoxOffice:
    """Holds expire after some minutes unless paid."""

    def __init__(self, pool, minutes):
        self.pool = pool
        self.minutes = minutes
        self.expiry = []
        self.sold = {}
        self.group_expiry = []

    def begin(self, buyer, now=None):
        now = time.time() if now is None else now
        seat = self.pool.hold()  # leak: expire pops the heap entry and forgets the seat
        heapq.heappush(self.expiry, (now + self.minutes * 60, buyer, seat))
        return seat

    def pay(self, buyer):
        for entry in self.expiry:
            if entry[1] == buyer:
                self.expiry.remove(entry)
                heapq.heapify(self.expiry)
                self.sold.setdefault(buyer, []).append(entry[2])
                return True
        return False

    def expire(self, now):
        lapsed = []
        while self.expiry and self.expiry[0][0] < now:
            _, buyer, _ = heapq.heappop(self.expiry)
            lapsed.append(buyer)
        return lapsed

    def refund(self, buyer):
        seats = self.sold.pop(buyer, [])
        for seat in seats:
            self.pool.unhold(seat)
        return len(seats)

    def begin_group(self, name, count, now):
        if len(self.pool) < count:
            return False
        seats = [self.pool.hold() for _ in range(count)]  # clean: expire_groups and leave_group unhold them
        heapq.heappush(self.group_expiry, (now + 3600, name, seats))
        return True

    def expire_groups(self, now):
        while self.group_expiry and self.group_expiry[0][0] < now:
            _, _, seats = heapq.heappop(self.group_expiry)
            for seat in seats:
                self.pool.unhold(seat)

    def leave_group(self, name):
        kept = []
        for entry in self.group_expiry:
            if entry[1] != name:
                kept.append(entry)
                continue
            for seat in entry[2]:
                self.pool.unhold(seat)
        heapq.heapify(kept)
        self.group_expiry = kept

    def preview(self):
        seat = self.pool.hold()  # clean: unheld below
        label = "row %s" % (seat,)
        self.pool.unhold(seat)
        return label
