"""Session keys for message signing, mixed into the protocol handlers."""
import hmac
import secrets


class KeyRing:
    def __init__(self, names):
        self._vacant = set(names)
        self._secret = {}

    def rent(self):
        name = self._vacant.pop()
        self._secret[name] = secrets.token_bytes(32)
        return name

    def surrender(self, name):
        self._secret.pop(name)
        self._vacant.add(name)

    def secret(self, name):
        return self._secret[name]


class SigningMixin:
    ring: KeyRing

    def rent_key(self):
        name = self.ring.rent()  # clean: handed to the caller
        self.audit("rent", name)
        return name

    def surrender_key(self, name):
        self.audit("surrender", name)
        self.ring.surrender(name)

    def sign(self, name, body):
        return hmac.new(self.ring.secret(name), body, "sha256").hexdigest()

    def audit(self, what, name):
        pass


class TellerHandler(SigningMixin):
    def __init__(self, ring, wire):
        self.ring = ring
        self.wire = wire
        self.trail = []

    def audit(self, what, name):
        self.trail.append((what, name))

    def transfer(self, body):
        key = self.rent_key()  # clean: surrendered
        self.wire.put(body, self.sign(key, body))
        self.surrender_key(key)
        return len(body)

    def quote(self, body):
        return self.sign(self.rent_key(), body)  # leak: sign only borrows the key

    def confirm(self, body, signature):
        key = self.rent_key()  # leak: a mismatch returns with the key rented
        if self.sign(key, body) != signature:
            self.trail.append(("mismatch", signature))
            return False
        self.wire.put(b"ok", signature)
        self.surrender_key(key)
        return True


class BulkHandler(SigningMixin):
    def __init__(self, ring, wire):
        self.ring = ring
        self.wire = wire

    def send_all(self, bodies):
        key = self.rent_key()  # clean: one key for all, surrendered in finally
        try:
            for body in bodies:
                if not body:
                    return False
                self.wire.put(body, self.sign(key, body))
            return True
        finally:
            self.surrender_key(key)
