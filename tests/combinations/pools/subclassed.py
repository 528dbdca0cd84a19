# take: P.allocate()
# give: P.release(X)
# gets: optional
# type: Base
import abc


class Base(abc.ABC):
    @abc.abstractmethod
    def allocate(self): ...

    @abc.abstractmethod
    def release(self, obj): ...


class Pool(Base):
    def __init__(self, objs):
        self._objs = list(objs)

    def allocate(self):
        if not self._objs:
            return None
        return self._objs.pop()

    def release(self, obj):
        self._objs.append(obj)
