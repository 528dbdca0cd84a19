"""Inventory reservations that can be split, merged and confirmed."""


class Stock:
    def __init__(self, quantity):
        self.free = dict(quantity)
        self.gone = {}

    def set_aside(self, sku, count):
        if self.free.get(sku, 0) < count:
            return None
        self.free[sku] -= count
        return Parcel(self, sku, count)


class Parcel:
    def __init__(self, stock, sku, count):
        self.stock = stock
        self.sku = sku
        self.count = count

    def confirm(self):
        self.stock.gone[self.sku] = self.stock.gone.get(self.sku, 0) + self.count

    def void(self):
        self.stock.free[self.sku] += self.count


def halves(parcel):
    """Two parcels that replace the given one."""
    left = parcel.count // 2
    return Parcel(parcel.stock, parcel.sku, left), Parcel(parcel.stock, parcel.sku, parcel.count - left)


def merged(a, b):
    a.count += b.count
    return a


class Shop:
    def __init__(self, stock, carrier):
        self.stock = stock
        self.carrier = carrier
        self.backlog = []

    def aside(self, sku, count):
        if count <= 0:
            return None
        return self.stock.set_aside(sku, count)  # clean: handed to the caller

    def ship_split(self, sku, count):
        parcel = self.aside(sku, count)  # clean: both halves are confirmed
        if parcel is None:
            return False
        for half in halves(parcel):
            self.carrier.label(half.sku, half.count)
            half.confirm()
        return True

    def ship_half(self, sku, count):
        parcel = self.aside(sku, count)  # leak: the second half is neither confirmed nor voided
        if parcel is None:
            return False
        now, later = halves(parcel)
        self.carrier.label(now.sku, now.count)
        now.confirm()
        self.carrier.announce(later.count)
        return True

    def ship_double(self, sku, count):
        first = self.aside(sku, count)  # clean: confirmed with the merged parcel, or voided
        if first is None:
            return False
        second = self.aside(sku, count)  # clean: merged into the first
        if second is None:
            first.void()
            return False
        merged(first, second).confirm()
        return True

    def ship_capped(self, sku, count, cap):
        parcel = self.aside(sku, count) or self.aside(sku, cap)  # leak: over the cap it is put on no list
        if parcel is None:
            return 0
        if parcel.count > cap:
            self.backlog.append((sku, count))
            return 0
        parcel.confirm()
        return parcel.count
