"""Texture units: bound for a draw, then unbound; the number is what is lent."""
import contextlib


class TextureUnits:
    def __init__(self, gl, count=16):
        self.gl = gl
        self.bound = dict.fromkeys(range(count))

    def bind(self, texture):
        unit = next((u for u, t in self.bound.items() if t is None), None)
        if unit is None:
            raise RuntimeError("texture units exhausted")
        self.bound[unit] = texture
        self.gl.bind(unit, texture)
        return unit

    def unbind(self, *units):
        for unit in units:
            self.bound[unit] = None
            self.gl.bind(unit, 0)

    @contextlib.contextmanager
    def using(self, *textures):
        units = []
        try:
            for texture in textures:
                units.append(self.bind(texture))
            yield units
        finally:
            self.unbind(*units)


class Material:
    def __init__(self, units, albedo, normal):
        self.units = units
        self.albedo = albedo
        self.normal = normal
        self.in_use = ()

    def enable(self):
        a = self.units.bind(self.albedo)  # clean: stored, unbound by disable
        n = self.units.bind(self.normal)  # clean: stored, unbound by disable
        self.in_use = (a, n)

    def disable(self):
        self.units.unbind(*self.in_use)
        self.in_use = ()


def draw(units, mesh, texture):
    with units.using(texture) as (unit,):  # clean: with
        mesh.draw(sampler=unit)


def draw_visible(units, mesh, texture, camera):
    unit = units.bind(texture)  # leak: culled meshes leave the unit bound
    if not camera.sees(mesh):
        return 0
    mesh.draw(sampler=unit)
    units.unbind(unit)
    return 1


def shadow_pass(units, mesh, depth, colour):
    d = units.bind(depth)  # clean: unbound below
    c = units.bind(colour)  # leak: only the depth unit is unbound
    mesh.draw_shadow(d, c)
    units.unbind(d)
