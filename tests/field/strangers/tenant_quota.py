"""Per-tenant admission: one quota object a tenant, grants move with the job."""
from __future__ import annotations

from typing import TypedDict


class Grant:
    def __init__(self, tenant: str, units: int) -> None:
        self.tenant = tenant
        self.units = units


class Quota:
    def __init__(self, tenant: str, units: int) -> None:
        self.tenant = tenant
        self.units = units

    def grant(self, units: int) -> Grant | None:
        if units > self.units:
            return None
        self.units -= units
        return Grant(self.tenant, units)

    def withdraw(self, grant: Grant) -> None:
        self.units += grant.units


class JobRow(TypedDict):
    name: str
    grant: Grant
    tries: int


class Admission:
    def __init__(self, quotas: dict[str, Quota]) -> None:
        self.quotas = quotas
        self.rows: dict[str, JobRow] = {}
        self.parked: list[JobRow] = []

    def admit(self, tenant: str, name: str, units: int) -> bool:
        if name in self.rows:
            return False
        grant = self.quotas[tenant].grant(units)  # clean: near miss, in a typed dict row, withdrawn by done, park keeps it
        if grant is None:
            return False
        self.rows[name] = {"name": name, "grant": grant, "tries": 0}
        return True

    def park(self, name: str) -> None:
        row = self.rows.pop(name)
        row["tries"] += 1
        self.parked.append(row)

    def unpark(self) -> None:
        while self.parked:
            row = self.parked.pop()
            if row["tries"] > 3 or row["name"] in self.rows:
                self._finish(row)
            else:
                self.rows[row["name"]] = row

    def done(self, name: str) -> None:
        self._finish(self.rows.pop(name))

    def _finish(self, row: JobRow) -> None:
        grant = row["grant"]
        self.quotas[grant.tenant].withdraw(grant)

    def could_admit(self, wishes: dict[str, int]) -> bool:
        grants: list[Grant] = []
        for tenant, units in wishes.items():
            grant = self.quotas[tenant].grant(units)  # leak: a refused tenant breaks out and only that case returns early
            if grant is None:
                break
            grants.append(grant)
        if len(grants) < len(wishes):
            return False
        for grant in grants:
            self.quotas[grant.tenant].withdraw(grant)
        return True

    def could_admit_fairly(self, wishes: dict[str, int]) -> bool:
        grants: list[Grant] = []
        for tenant, units in wishes.items():
            grant = self.quotas[tenant].grant(units)  # clean: near miss, withdrawn in the loop whether or not all were granted
            if grant is None:
                break
            grants.append(grant)
        enough = len(grants) == len(wishes)
        for grant in grants:
            self.quotas[grant.tenant].withdraw(grant)
        return enough

    def transfer(self, name: str, tenant: str) -> bool:
        row = self.rows.get(name)
        if row is None:
            return False
        fresh = self.quotas[tenant].grant(row["grant"].units)  # leak: a tenant's move to itself returns with the second grant
        if fresh is None:
            return False
        if row["grant"].tenant == tenant:
            return True
        old, row["grant"] = row["grant"], fresh
        self.quotas[old.tenant].withdraw(old)
        return True
