"""Looks for a way to build and feed a target that really runs: combinations in turn, the likeliest first."""

import inspect
import linecache
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from auditor.leaktests.plan import Argument, Recipe, Target
from auditor.leaktests.probe import signatures
from auditor.leaktests.probe.arguments import Candidate, Proposer
from auditor.leaktests.probe.attempts import Attempts, NoPlan, Way
from auditor.leaktests.probe.choices import likeliest
from auditor.leaktests.probe.running import (
    NothingComesOut,
    Scope,
    raised_at,
    said,
    tensors_or_raise,
    wants_no_gradients,
)
from auditor.leaktests.probe.signatures import Parameter
from auditor.leaktests.probe.widths import widths_of
from auditor.leaktests.proposals import known_size
from auditor.leaktests.support.scenarios import use

MOST_BUILDS = 150
MOST_BUILT = 10
MOST_LESSONS = 5
MOST_FEEDS = 600
MOST_FEED_SECONDS = 2.5
TRIED_BEFORE_OPTIONS = 3
MOST_EMPTY = 3
MOST_PARAMETERS = 20_000_000
FIRST_SHAPE = (2, 32)


@dataclass(slots=True)
class Search:
    """The search for one target."""

    target: Target
    thing: Any
    proposer: Proposer
    scope: Scope
    recipe: Recipe
    attempts: Attempts
    best: Way | None = None  # the likeliest, which did not run: where a recipe starts from

    def way(self) -> Way:
        """The first that runs. Raises NoPlan."""
        first: BaseException | None = None
        for build, imports, callee in self._built():
            try:
                feed, more = self._fed(callee, build, imports)
            except NoPlan as error:
                first = first or error
                if self.attempts.out_of_time:
                    break
                continue
            return Way(build, feed, tuple(dict.fromkeys((*imports, *more))))
        raise first or NoPlan(self.attempts.told[0] if self.attempts.told else "there is nothing to try")

    # -- building

    def _built(self) -> Iterator[tuple[tuple[Argument, ...], tuple[str, ...], Any]]:
        """Every way of building that works, with what is then called."""
        if self.target.kind == "autograd":
            yield (), self.recipe.imports, self.thing.apply
        elif not isinstance(self.thing, type):
            yield (), self.recipe.imports, self.thing
        else:
            yield from self._modules()

    def _modules(self) -> Iterator[tuple[tuple[Argument, ...], tuple[str, ...], Any]]:
        built = 0
        for _ in range(MOST_LESSONS):
            known = dict(self.proposer.overrides)
            for build, imports in self._constructions():
                module = self._try_build(build, imports)
                if module is None and not built and self.proposer.overrides != known:
                    break  # what was learned is tried at once
                if module is None:
                    continue
                yield build, imports, module
                built += 1
                if built >= MOST_BUILT:
                    return
            if built or self.proposer.overrides == known:
                return  # what assertions taught would change nothing

    def _constructions(self) -> Iterator[tuple[tuple[Argument, ...], tuple[str, ...]]]:
        parameters = signatures.constructor(self.thing)
        given = [Argument(name, value) for name, value in self.recipe.build.items()]
        if given:
            yield tuple(given), self.recipe.imports
            return
        required = [parameter for parameter in parameters if parameter.required]
        small = self.proposer.shrunk(parameters)
        lists = [self.proposer.to_build(parameter) for parameter in required]
        for number, ranks in enumerate(likeliest([len(values) for values in lists], MOST_BUILDS)):
            if number == TRIED_BEFORE_OPTIONS:
                yield from self._with_an_option(parameters, small)
            arguments, imports = _chosen(required, lists, ranks)
            if small:
                yield (*arguments, *small), imports
            yield arguments, imports
        if not lists:
            yield from self._with_an_option(parameters, small)

    def _with_an_option(
        self, parameters: Sequence[Parameter], small: list[Argument]
    ) -> Iterator[tuple[tuple[Argument, ...], tuple[str, ...]]]:
        """`config: Config | None = None` and `embed_tokens=None` are optional in the signature alone."""
        required = [p for p in parameters if p.required]
        lists = [self.proposer.to_build(parameter) for parameter in required]
        arguments, more = _chosen(required, lists, [0] * len(lists))
        for parameter in parameters:
            if not parameter.required and parameter.default is None:
                for text, imports in self.proposer.optional(parameter):
                    others = [argument for argument in small if argument.name != parameter.name]
                    yield (*arguments, *others, Argument(parameter.name, text)), (*imports, *more)

    def _try_build(self, build: tuple[Argument, ...], imports: tuple[str, ...]) -> Any:
        if self.attempts.out_of_time:
            return None
        self.attempts.tried += 1
        call = f"{self.target.name}({_text(build)})"
        if self.best is None:
            self.best = Way(build, (), imports)
        try:
            torch.manual_seed(0)
            module = self.scope.call(self.thing, build, FIRST_SHAPE, (*self.recipe.imports, *imports))
            if isinstance(module, torch.nn.Module):
                if sum(p.numel() for p in module.parameters()) > MOST_PARAMETERS:
                    raise NoPlan("it has too many parameters to be tested in a second")
                module.to(self.scope.value("device"))
            return getattr(module, self.recipe.method) if self.recipe.method else module
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:
            self._learn(error)
            self.attempts.failed(call, error)
            return None

    def _learn(self, error: BaseException) -> None:
        """An assertion that failed says what it wants: `assert args.multiway`, `assert size > 0`."""
        if not isinstance(error, AssertionError):
            return
        file, _, line = raised_at(error).rpartition(":")
        source = linecache.getline(file, int(line)) if line else ""
        if match := re.match(
            r"\s*assert (not )?(?:\w+\.)*(\w+)\s*(?:,.*|(>|>=|==|is not)\s*(\w+).*)?$", source
        ):
            denied, name, relation, bound = match[1], match[2], match[3], match[4]
            if relation is None:
                self.proposer.overrides.setdefault(name, "False" if denied else "True")
            elif relation.startswith(">"):
                self.proposer.overrides.setdefault(name, "100" if "vocab" in name or "token" in name else "4")
            elif relation == "==" and bound:
                self.proposer.overrides.setdefault(name, bound)
            return
        for parameter in signatures.constructor(self.thing):  # `assert self.causal ^ self.cross`
            named = re.search(rf"\b{parameter.name}\b", f"{source} {error}")
            if not named or parameter.required or parameter.name in self.proposer.overrides:
                continue
            if isinstance(parameter.default, bool):
                self.proposer.overrides[parameter.name] = str(not parameter.default)
                return
            if parameter.default is None and (size := known_size(parameter.name)):
                self.proposer.overrides[parameter.name] = size
                return

    # -- feeding

    def _fed(
        self, callee: Any, build: tuple[Argument, ...], imports: tuple[str, ...]
    ) -> tuple[tuple[Argument, ...], tuple[str, ...]]:
        parameters = self._call_parameters()
        if self.recipe.feed or self.recipe.args:
            given = [Argument(f"_{k}", text, True) for k, text in enumerate(self.recipe.args)]
            given += [Argument(name, text) for name, text in self.recipe.feed.items()]
            self._run(
                callee, given, [self.scope.value(a.value, FIRST_SHAPE, self.recipe.imports) for a in given]
            )
            return tuple(given), self.recipe.imports
        docs = [self.target.doc, inspect.getdoc(self._forward()) or ""]
        widths = widths_of(callee) if isinstance(callee, torch.nn.Module) else ()
        lists = [self.proposer.to_call(parameter, docs, widths) for parameter in parameters]
        required = [place for place, parameter in enumerate(parameters) if parameter.required]
        first: BaseException | None = None
        for chosen in _selections(required, parameters):
            try:
                return self._first_that_runs(
                    callee, build, [parameters[i] for i in chosen], [lists[i] for i in chosen]
                )
            except NoPlan as error:
                first = first or error
                if self.attempts.out_of_time:
                    break
        raise first or NoPlan("it takes nothing that could be fed")

    def _first_that_runs(
        self,
        callee: Any,
        build: tuple[Argument, ...],
        parameters: Sequence[Parameter],
        lists: Sequence[list[Candidate]],
    ) -> tuple[tuple[Argument, ...], tuple[str, ...]]:
        values: dict[Candidate, Any] = {}
        first: BaseException | None = None
        until = time.process_time() + MOST_FEED_SECONDS
        empty = 0  # calls that went well and returned nothing to hold on to
        for ranks in likeliest([len(entry) for entry in lists], MOST_FEEDS):
            if self.attempts.out_of_time or empty >= MOST_EMPTY or time.process_time() > until:
                break
            arguments, imports = _chosen(parameters, lists, ranks)
            try:
                for place, rank in enumerate(ranks):
                    if (key := lists[place][rank]) not in values:
                        values[key] = self.scope.value(key[0], FIRST_SHAPE, key[1])
                self._run(callee, arguments, [values[lists[i][rank]] for i, rank in enumerate(ranks)])
                return arguments, imports
            except (KeyboardInterrupt, MemoryError):
                raise
            except BaseException as error:
                empty += isinstance(error, NothingComesOut)
                if first is None:
                    first = error
                    self.attempts.failed(f"{self.target.name}({_text(build)})({_text(arguments)})", error)
                    if self.best is None or not self.best.feed:
                        self.best = Way(build, arguments, imports)
        if first is None and not lists:
            raise NoPlan("it takes nothing that could be fed")
        if isinstance(first, NothingComesOut):
            raise NoPlan(str(first))
        raise NoPlan(said(first) if first else "no time was left to feed it")

    def _run(self, callee: Any, arguments: Sequence[Argument], values: Sequence[Any]) -> None:
        self.attempts.tried += 1
        torch.manual_seed(0)
        positional = [v for a, v in zip(arguments, values, strict=True) if a.positional]
        named = {a.name: v for a, v in zip(arguments, values, strict=True) if not a.positional}
        try:
            outputs = callee(*positional, **named)
        except RuntimeError as error:
            if not wants_no_gradients(error):
                raise
            with torch.no_grad():
                outputs = callee(*positional, **named)
        if self.target.kind == "code":
            use(outputs)
        else:
            tensors_or_raise(outputs)

    def _call_parameters(self) -> list[Parameter]:
        autograd = self.target.kind == "autograd"
        return signatures.call(
            self._forward(), skip_first=isinstance(self.thing, type), all_positional=autograd
        )

    def _forward(self) -> Any:
        if not isinstance(self.thing, type):
            return self.thing
        return getattr(self.thing, self.recipe.method or "forward")


def _selections(required: list[int], parameters: Sequence[Parameter]) -> Iterator[list[int]]:
    """What is required; then, one by one, what could be given besides; then the first two of those."""
    yield required
    optional = [i for i, p in enumerate(parameters) if not p.required and p.default is None]
    for place in optional[:6]:
        yield sorted([*required, place])
    if len(optional) > 1 and not required:
        yield optional[:2]


def _chosen(
    parameters: Sequence[Parameter], lists: Sequence[list[Candidate]], ranks: Sequence[int]
) -> tuple[tuple[Argument, ...], tuple[str, ...]]:
    arguments: list[Argument] = []
    imports: list[str] = []
    for parameter, values, rank in zip(parameters, lists, ranks, strict=True):
        text, lines = values[rank]
        arguments.append(Argument(parameter.name, text, parameter.positional))
        imports += lines
    return tuple(arguments), tuple(dict.fromkeys(imports))


def _text(arguments: Sequence[Argument]) -> str:
    return ", ".join(argument.text for argument in arguments)
