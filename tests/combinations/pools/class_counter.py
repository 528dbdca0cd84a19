# take: P.take_units(n)
# give: P.put_units(n)
# gets: answer
class Pool:
    units = 64
    lock = threading.Lock()

    @classmethod
    def take_units(cls, n):
        with cls.lock:
            if cls.units < n:
                return False
            cls.units -= n
            return True

    @classmethod
    def put_units(cls, n):
        with cls.lock:
            cls.units += n
