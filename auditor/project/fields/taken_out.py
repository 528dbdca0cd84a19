"""What a method takes out of a container of leases, and loses: a timer that was cancelled, a transfer that
failed, the requests that a filter leaves out.

The container is followed from the method's entry on. What it holds is lost where an entry is out of it and in
no hands: nothing gave it back, kept it, or was given it. Somebody else may see to that entry, and no more is
said then: whoever calls the method and gives things back himself, or whoever writes what the way asks for
(`if timer.cancelled: continue`)."""

import ast
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial

from auditor.flow.effects import Value
from auditor.flow.lease import Field, Leak, Loss, StoredField
from auditor.flow.trace import span_of
from auditor.ir.ops import ANY_ITEM, RESULT, Leave, Path
from auditor.model import Span
from auditor.project.code.bindings import assignments, root_of, told_by_position
from auditor.project.code.field_paths import mentions, own_field, shortened
from auditor.project.code.modules import Function
from auditor.project.code.one_way import on_one_way
from auditor.project.code.release_names import ENDING, looks_releasing
from auditor.project.code.scripts import has_to_do_with, is_script
from auditor.project.fields.by_word import comes_back_by_word
from auditor.project.fields.elsewhere import released_attributes
from auditor.project.fields.filtered_after import is_filtered_after
from auditor.project.fields.flags_beside import flags_set
from auditor.project.fields.forgetting import (
    HANDING_ON,
    INITIAL,
    all_from_others,
    for_good,
    is_from_another_field,
    starts_anew,
)
from auditor.project.fields.handled_failures import lost_in_a_handler
from auditor.project.fields.in_part import InPart
from auditor.project.fields.moved_on import moves_on
from auditor.project.fields.other_parts import asked_of_other_parts
from auditor.project.fields.own_records import is_its_end, sees_to_its_records, struck_off
from auditor.project.fields.partial import unpacked_from
from auditor.project.fields.picked_out import is_made_of_its_own
from auditor.project.fields.pools_anew import begins_its_pool_anew
from auditor.project.fields.swept_in_part import is_swept
from auditor.project.fields.taken_again import Taking
from auditor.project.fields.ways_out import TAKING, WayOut, goes_out_of_hand
from auditor.project.fields.worked_with import works_with_its_entry
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

NEW = (ast.Await, ast.Constant, ast.JoinedStr)
"""What is made on the spot, and is nothing that was taken out: `job.turns.append(await worker.ask(text))`."""


class TakenOut(InPart):
    """Asks of the methods of a class which entries of a container they lose. `takings` are the calls that
    take those out which the method gives back or keeps on another way, `noted` containers that are known
    to have it alone, where records note its key, or to which it has moved."""

    takings: list[Taking]
    wanted: Sequence[Outcome]
    noted: frozenset[Path] = frozenset()

    def _lost_entries(
        self, outcome: Outcome, family: list[Function], method: Function, path: Path
    ) -> Iterator[Leak]:
        """Of what the tree's own pools lent, where nobody but the container has it."""
        acquisition, container = outcome.acquisition, path[:2]
        own = outcome.function.parameters[0]
        others = {place[:2] for place in outcome.beside if place[0] == own or place == RESULT} - {container}
        if path in self.noted:
            others = set()
        elif others - {RESULT}:
            return
        if path[2:3] != (ANY_ITEM,):
            return
        if others and not sees_to_its_records(self.recogniser, outcome):
            return
        if method.name in INITIAL or method.is_abstract or not HANDING_ON.isdisjoint(split(method.name)):
            return
        if begins_its_pool_anew(self.recogniser, outcome, method):
            return
        if is_its_end(self.recogniser, method, acquisition.protocol) and path[1][1:] in struck_off(method):
            return  # `self.held.pop(lease.token)` in `surrender(lease)`
        ends = self.recogniser.ending_names(acquisition.protocol)
        if comes_back_by_word(outcome, family, ends) or is_filtered_after(method, path[1][1:], ends):
            return
        told: set[Span] = set()
        whole = self.whole.get(path, path)
        yield from self._lost_in_handlers(outcome, method, path)
        flags = flags_set(self.model, outcome.function, outcome.call)
        for way in self._ways(outcome, method, path):
            if (
                way.taken is None
                or (acquisition.foreign and getattr(getattr(way.taken, "func", None), "attr", "") == "clear")
                or way.is_told_apart()
                or way.is_put_over()
                or is_swept(method, path[1][1:], way.taken, outcome.function)
                or is_made_of_its_own(method, way.taken, path[1][1:])
            ):
                continue
            if not way.is_sure() and not (way.is_another() and self._for_good(outcome, method)):
                continue
            if way.is_for_others(flags) or _is_moved_on(method, way.taken):
                continue
            within = whole != path or acquisition.value is not Value.TENSOR
            no_way = acquisition.telling | self._fields_beside(outcome, path)
            told_only = no_way | self._told_to_others(outcome, method)
            told_only |= {part for _, part in self._of_other_parts(outcome, method, path)}
            if within and way.is_worked_with(
                told_only,
                whole[-1],
                partial(self._may_reach_its_end, outcome),
                partial(self._only_asks, outcome, method),
            ):
                continue
            span = span_of(method.module.path, way.taken, method.module.lines)
            if span not in told and not self._ended_by_who_says(outcome, way, family, method):
                told.add(span)
                if (call := way.taken_again()) is not None:
                    self.takings.append(Taking(outcome, method, call, whole, span))
                yield Leak(Loss.DELETED, span, "", (), parted=True)

    def _lost_in_handlers(self, outcome: Outcome, method: Function, path: Path) -> Iterator[Leak]:
        own, whole = method.parameters[0], self.whole.get(path, path)
        place = (own, *whole[1:])
        if "except" not in method.text:
            return
        calm = self._followed(method, place, outcome.acquisition)
        followed = self.followed_all(method, (place,), outcome.acquisition, edges="explicit")
        if calm is None or followed is None:
            return
        for taken in lost_in_a_handler(method, calm, followed, (own, path[1])):
            yield Leak(
                Loss.DELETED, span_of(method.module.path, taken, method.module.lines), "", (), parted=True
            )
            return

    def _listed_with_it(self, outcome: Outcome) -> Iterator[StoredField]:
        """`request.blocks = blocks`, and `self.running.append(request)`: what the list loses of requests."""
        for path in sorted(outcome.beside):
            cls = outcome.function.cls
            if cls is None or not own_field(outcome.function, path) or path[2:3] != (ANY_ITEM,):
                continue
            short, family = shortened(path), list(self.family_of(cls))
            field = next((piece[1:] for piece in reversed(path) if piece.startswith(".")), "")
            enders = [method.qualname for method in self._ending(outcome, field)]
            self.whole[short] = path
            drops = [
                drop
                for method in family
                if enders and method.owner is not None and mentions(method, path[1][1:])
                for drop in self._lost_entries(outcome, family, method, short)
            ]
            if drops:
                yield StoredField(
                    Field(cls.qualname, "".join(short[1:])[1:]),
                    outcome.lease.span,
                    tuple(enders),
                    drops=tuple(drops),
                )

    def _loses_entries(self, outcome: Outcome, described: StoredField) -> bool:
        """Those that its callers are shown are the class's to give back, and it does so, but for these."""
        if described.escapes or not outcome.recorded:
            return False
        if described.released_by and any(drop.loss is Loss.DELETED for drop in described.drops):
            return True
        losing = any(drop.holder != "clear" for drop in described.drops)
        return losing and sees_to_its_records(self.recogniser, outcome)

    def _ending(self, outcome: Outcome, field: str) -> Iterator[Function]:
        """Functions that give back what is in a field so named, of another object than their own."""
        for module in self.project.parsed():
            for function in list(module.by_node.values()) if f".{field}" in module.text else ():
                if f".{field}" in function.text and self._gives_back(outcome, function, field):
                    yield function

    def _gives_back(self, outcome: Outcome, function: Function, field: str) -> bool:
        return field in released_attributes(function, known=self._known_releases(outcome, function))

    def _known_releases(self, outcome: Outcome, function: Function) -> Set[ast.Call]:
        """By the names of what gives back to the pool: every function of the tree is asked, so that nothing
        is followed here."""
        names = self.recogniser.ending_names(outcome.acquisition.protocol)
        return {call for call in function.calls if last_name(call) in names}

    def _releases(self, outcome: Outcome, function: Function) -> list[ast.Call]:
        """By what they are known to do, and by their names, a mere hint of an end included."""
        known = self._known_releases(outcome, function)
        return [call for call in function.calls if call in known or _may_end(call)]

    def _for_good(self, outcome: Outcome, method: Function, scripts: bool = True, table: str = "") -> bool:
        """That `self._evict()` is called is no sign of an end beside it, nor that what lies in another field
        than the `table` is given back; nor, if `scripts` do not count, is what a script ends that has nothing
        to do with the call."""

        def gives_back(caller: Function) -> bool:
            releases = [
                each
                for each in self._releases(outcome, caller)
                if last_name(each) != method.name
                and self._may_reach_its_end(outcome, each)
                and not (table and is_from_another_field(each, caller, table))
            ]
            calls = [each for each in caller.calls if last_name(each) == method.name]
            pairs = [(end, call) for end in releases for call in calls if on_one_way(caller, end, call)]
            if scripts or not is_script(caller):
                return bool(pairs)
            return any(has_to_do_with(end, call, caller) for end, call in pairs)

        return for_good(self.project, method, gives_back)

    def _ways(self, outcome: Outcome, method: Function, path: Path) -> Iterator[WayOut]:
        own, whole = method.parameters[0], self.whole.get(path, path)
        followed = self._followed(method, (own, *whole[1:]), outcome.acquisition)
        if followed is None:
            return
        others = {(own, *each[1:]) for each in outcome.beside if each[:2] == path[:2]} - {(own, *whole[1:])}
        ways = [self._followed(method, each, outcome.acquisition) for each in sorted(others)]
        endings = followed.endings
        shown = (
            endings.released or endings.returned or any(each[0] == RESULT[0] for _, each in endings.beside)
        )
        if not shown and not self._alone(outcome, method, path):
            return
        if not followed.endings.released and any(way is None or way.endings.released for way in ways):
            return  # `[(work, buffer)]`: the buffer, which the work knows too
        for loss, node, held in followed.endings.lost:
            if loss is not Loss.RAISE:
                yield WayOut(method, followed, node, held, (own, path[1]), _inner_table(whole))
        yields = any(isinstance(node, ast.Yield) for node in method.nodes)  # its caller gets it before that
        for node in followed.endings.stored:
            op = method.graph.ops[node]
            for held in followed.solution.states[node]:
                of_others = any(place[0] in method.parameters or place[0][0] in "@%" for place in held.places)
                out_of_hand = not yields and goes_out_of_hand(method, op, held)
                if not of_others and (isinstance(op, Leave) or out_of_hand):
                    yield WayOut(method, followed, node, held, (own, path[1]), _inner_table(whole))

    def _alone(self, outcome: Outcome, method: Function, path: Path) -> bool:
        """The method gives nothing back itself, and neither do its callers; nor is the pool made anew, or the
        method told the entry itself."""
        attribute = path[1][1:]
        pools = {node.attr for node in walk(outcome.call.func) if isinstance(node, ast.Attribute)}
        parts = self._fields_beside(outcome, path)
        beside = {field[1:] for field in parts} | {*unpacked_from(method, attribute, parts)}
        beside |= _fields_told(method, self.whole.get(path, path))
        of_others = [call for call, _ in self._of_other_parts(outcome, method, path)]
        of_lists = _on_inner_lists(method, self.whole.get(path, path))
        releases = [
            each
            for each in self._releases(outcome, method)
            if not _only_of(each, beside)
            and each is not outcome.call
            and not self._ends_others(outcome, method, each)
            and each not in of_others
            and self._may_reach_its_end(outcome, each)
        ]
        others = (each for each in self._those_beside(method) if each is not method)
        return (
            (
                all_from_others(releases, method, attribute)
                or (
                    all_from_others(releases, method, attribute, looped=True)
                    and not moves_on(others, attribute)
                )
            )
            and not starts_anew(method, attribute, pools, [*of_others, *of_lists])
            and self._for_good(outcome, method, scripts=False, table=attribute)
            and not works_with_its_entry(
                method, attribute, self.recogniser.ending_names(outcome.acquisition.protocol)
            )
        )

    def _ends_others(self, outcome: Outcome, method: Function, call: ast.Call) -> bool:
        """`self.budget.refund(job.tokens)`, to another pool, or of an object of another class, which gives
        nothing back to this one."""
        calls, protocol = self.recogniser.calls, outcome.acquisition.protocol
        targets = () if calls.guessed(method, call) else calls.targets(method, call)[0]
        releasing = self.recogniser.releasing
        pools = {releasing[each][0].name.partition(".")[0] for each in targets if each in releasing}
        if pools and protocol.partition(".")[0] not in pools:
            return True
        others = [each.cls for each in targets if each.cls is not None and each.cls is not method.cls]
        pool, ends = protocol.partition(".")[0], self.recogniser.ending_names(protocol)
        return 0 < len(targets) == len(others) and not any(
            cls.name == pool or any(f"{end}(" in cls.text for end in ends) for cls in others
        )

    def _may_reach_its_end(self, outcome: Outcome, call: ast.Call) -> bool:
        """Of what the tree's own pools lent that is known."""
        acquisition = outcome.acquisition
        return acquisition.foreign or self.leading.may_end(acquisition.protocol, call)

    def _of_other_parts(
        self, outcome: Outcome, method: Function, path: Path
    ) -> Iterator[tuple[ast.Call, str]]:
        ends = self.recogniser.ending_names(outcome.acquisition.protocol)
        whole = self.whole.get(path, path)
        return asked_of_other_parts(self.recogniser.calls, outcome, method, whole, ends)

    def _only_asks(self, outcome: Outcome, method: Function, call: ast.Call) -> bool:
        """`self.pool.users(entry)`, and `self._end(entry)` of a function that the tree has and that reaches
        none of the pool's ends."""
        calls = self.recogniser.calls
        followed = not calls.guessed(method, call) and bool(calls.targets(method, call)[0])
        return self._works_out(method, call) or (followed and not self._may_reach_its_end(outcome, call))

    def _works_out(self, method: Function, call: ast.Call) -> bool:
        """It hands on nothing, and keeps nothing."""
        calls = self.recogniser.calls
        targets = () if calls.guessed(method, call) else calls.targets(method, call)[0]
        return bool(targets) and all(
            not target.calls
            and not any(
                isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
                for node in target.nodes
            )
            for target in targets
        )

    def _told_to_others(self, outcome: Outcome, method: Function) -> frozenset[str]:
        """`.tokens` of that, or of `self.rate(job.tokens)`, which works something out."""
        calls = (
            call
            for call in method.calls
            if self._ends_others(outcome, method, call) or self._works_out(method, call)
        )
        return frozenset(
            f".{each.attr}"
            for call in calls
            for each in call.args
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)
        )

    def _those_beside(self, method: Function) -> Iterator[Function]:
        return self.family_of(method.cls) if method.cls is not None else iter(())

    def _fields_beside(self, outcome: Outcome, path: Path) -> frozenset[str]:
        """`.worker` of the entry that holds this one as `.ticket`: each has a lease of its own."""
        whole = self.whole.get(path, path)
        if len(whole) != 4:
            return frozenset()
        return frozenset(
            place[3]
            for other in self.wanted
            if other.call is not outcome.call and other.function is outcome.function
            for place in (*(place for _, place in other.stored), *other.beside)
            if place[:3] == whole[:3] and len(place) >= 4 and place[3] != whole[3]
        )

    def _ended_by_who_says(
        self, outcome: Outcome, way: WayOut, family: list[Function], method: Function
    ) -> bool:
        """Whoever sets what the way asks for gives things back, or is called by somebody who does, or is such
        an end itself: `if line.users:`; or the answer is computed, and not by a pool, which says what room it
        has."""
        pools, cls = self.recogniser.pools, method.cls
        names, found = {name[1:] for name in way.asked() if name.startswith(".")}, way.found_in()
        if cls is not None:
            names = {name for name in names if self.model.attribute_type(cls, name) not in pools}
        ends = self.recogniser.ends_of(outcome.acquisition.protocol)
        if any(names & set(_changed(end, found)) for end in ends):
            return True
        modules = {each.module.path: each.module for each in (method, *family)}
        others = [each for module in modules.values() for each in module.by_node.values()]
        if any(each.is_method and each.name in names and each.cls not in pools for each in others):
            return True
        return any(
            self._releases(outcome, each) or not self._for_good(outcome, each)
            for each in others
            if each is not method and each.name not in INITIAL and names & set(_changed(each, found))
        )


def _is_moved_on(method: Function, taken: ast.AST) -> bool:
    """`del self.by_row[request.row]`, and `other.by_row[row] = request`: of what its caller has anyway."""
    key = taken.slice if isinstance(taken, ast.Subscript) else None
    root = root_of(key) if isinstance(key, ast.Attribute) else ""
    return root in method.parameters[1:] and any(
        isinstance(value, ast.Name) and value.id == root and isinstance(target, ast.Subscript)
        for target, value in assignments(method)
    )


def _inner_table(whole: Path) -> str:
    """`.nics` of `self.machines[*].nics[*].mac`: a table that each record has; `[*]` of `self.idle[*][*]`: a
    list for each key."""
    inner = whole[2:5]
    if whole[2:4] == (ANY_ITEM, ANY_ITEM):
        return ANY_ITEM
    return inner[1] if len(inner) == 3 and inner[0] == inner[2] == ANY_ITEM and inner[1][0] == "." else ""


def _on_inner_lists(method: Function, whole: Path) -> list[ast.Call]:
    """`sequence.pages.clear()`, of what lies in `self.running[*].pages[*]`."""
    return [
        call
        for call in method.calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Attribute)
        and f".{call.func.value.attr}" in whole[2:]
    ]


def _fields_told(method: Function, whole: Path) -> set[str]:
    """`snapshot` of `release(session.snapshot)`: that says nothing of a table which the session has."""
    told = (each for call in method.calls for _, each in told_by_position(call))
    fields = {
        each.attr for each in told if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)
    }
    return {each for each in fields if f".{each}" not in whole} if _inner_table(whole) else set()


def _may_end(call: ast.Call) -> bool:
    name = last_name(call)
    notes = name == "append" and all(isinstance(each, NEW) for each in call.args)
    hinted = ENDING.search(name) is not None and name not in TAKING and not notes
    return hinted or looks_releasing(call)


def _only_of(call: ast.Call, fields: Set[str]) -> bool:
    """`self.pool.checkin(job.worker)` says nothing of `job.ticket`, nor does `self.pool.checkin(worker)`."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return bool(given) and all(getattr(each, "attr", getattr(each, "id", None)) in fields for each in given)


def _changed(function: Function, found: Mapping[str, str]) -> Iterator[str]:
    """`timer.cancelled = True`, `self.cancelled.add(timer)`, `self.states[key] = 2`; of what is `found` to be
    `Phase.ENCODING`, not that it is made `Phase.DONE`."""
    other = {
        id(target)
        for target, value in assignments(function)
        if isinstance(target, ast.Attribute) and isinstance(value, ast.Attribute) and value.attr.isupper()
        if found.get(target.attr, ast.unparse(value)) != ast.unparse(value)
    }
    for node in function.own_nodes:
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()) if id(node) not in other:
                yield name
            case ast.Subscript(value=ast.Attribute(attr=name), ctx=ast.Store() | ast.Del()):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name))):
                yield name
