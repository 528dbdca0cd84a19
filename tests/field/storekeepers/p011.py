import weakref


class TextureUnit:
    def __init__(self, number):
        self.number = number
        self.bound = None


class UnitPool:
    def __init__(self, count):
        self.ready = [TextureUnit(i) for i in range(count)]
        self.out = set()

    def bind(self, name):
        unit = self.ready.pop()
        unit.bound = name
        self.out.add(unit)
        return unit

    def unbind(self, unit):
        unit.bound = None
        self.out.discard(unit)
        self.ready.append(unit)


class Sprite:
    def __init__(self, name, x, y):
        self.name = name
        self.x, self.y = x, y
        self.unit = None


class Scene:
    def __init__(self, units):
        self.units = units
        self.sprites = weakref.WeakValueDictionary()
        self.layers = {}
        self.skybox = None

    def spawn(self, sid, name, x, y):
        sprite = Sprite(name, x, y)
        sprite.unit = self.units.bind(name)  # leak: despawn removes the sprite without unbind
        self.sprites[sid] = sprite
        return sprite

    def despawn(self, sid):
        sprite = self.sprites.pop(sid, None)
        return None if sprite is None else (sprite.x, sprite.y)

    def add_layer(self, depth, name):
        if depth in self.layers:
            self.units.unbind(self.layers[depth])
        self.layers[depth] = self.units.bind(name)  # clean: replaced, removed and cleared with unbind

    def drop_layer(self, depth):
        unit = self.layers.pop(depth, None)
        if unit is not None:
            self.units.unbind(unit)

    def set_skybox(self, name):
        if self.skybox is not None and self.skybox.bound == name:
            return
        self.skybox = self.units.bind(name)  # leak: another name overwrites the unit that is held

    def thumbnail(self, name, shade):
        unit = self.units.bind(name)  # clean: unbound below
        color = shade(unit.number)
        self.units.unbind(unit)
        return color

    def clear(self):
        for depth in sorted(self.layers):
            self.drop_layer(depth)
        if self.skybox is not None:
            self.units.unbind(self.skybox)
            self.skybox = None
