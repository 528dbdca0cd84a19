# CHARGE: self.used[key] += X
# REFUND: self.used[key] -= X
# SHORT: self.used[key] + X > self.cap
# TRY: self.charge(key, X)
# UNDO: self.uncharge(key, X)
class Accounts:
    def __init__(self, devices, cap):
        self.cap = cap
        self.used = dict.fromkeys(devices, 0)

    def charge(self, key, n):
        if self.used[key] + n > self.cap:
            return False
        self.used[key] += n
        return True

    def uncharge(self, key, n):
        self.used[key] -= n
