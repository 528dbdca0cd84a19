class Cart:
    def __init__(self):
        self.lines = {}
        self.coupon = None

    def total(self):
        return sum(qty for _, qty in self.lines.values())


class Stock:
    def __init__(self, levels):
        self.levels = dict(levels)

    def withhold(self, sku, qty):
        if self.levels.get(sku, 0) < qty:
            return None
        self.levels[sku] -= qty
        return sku, qty

    def put_back(self, part):
        sku, qty = part
        self.levels[sku] += qty


class CouponPool:
    def __init__(self, codes):
        self.codes = list(codes)

    def take_code(self):
        return self.codes.pop() if self.codes else None

    def return_code(self, code):
        self.codes.append(code)


class Shop:
    def __init__(self, stock, coupons):
        self.stock = stock
        self.coupons = coupons
        self.carts = {}
        self.samples = []

    def add(self, user, sku, qty):
        cart = self.carts.setdefault(user, Cart())
        if sku in cart.lines:
            self.stock.put_back(cart.lines.pop(sku))
        part = self.stock.withhold(sku, qty)  # leak: merge lets the other cart's line win over this one
        if part is not None:
            cart.lines[sku] = part
        return part is not None

    def apply_coupon(self, user):
        cart = self.carts.setdefault(user, Cart())
        if cart.coupon is None:
            cart.coupon = self.coupons.take_code()  # leak: merge drops the guest cart with its coupon
        return cart.coupon

    def merge(self, guest, user):
        other = self.carts.pop(guest, None)
        if other is None:
            return 0
        cart = self.carts.setdefault(user, Cart())
        cart.lines.update(other.lines)
        return cart.total()

    def empty(self, user):
        cart = self.carts.pop(user, None)
        if cart is None:
            return
        for part in cart.lines.values():
            self.stock.put_back(part)
        if cart.coupon is not None:
            self.coupons.return_code(cart.coupon)

    def show_sample(self, sku):
        part = self.stock.withhold(sku, 1)  # clean: clear_samples puts all back
        if part is not None:
            self.samples.append(part)

    def clear_samples(self):
        while self.samples:
            self.stock.put_back(self.samples.pop())

    def check(self, sku, qty):
        part = self.stock.withhold(sku, qty)  # clean: put back at once
        if part is None:
            return False
        self.stock.put_back(part)
        return True
