"""The candidates of each parameter: values by name and type, and instances of the project's own classes."""

import enum
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from auditor.leaktests import proposals
from auditor.leaktests.plan import Argument, Plan
from auditor.leaktests.probe.signatures import Parameter, constructor, is_plain_class

_CONFIG_NAMES = ("args", "config", "cfg", "configuration", "conf", "options", "hparams")
_MODULE_NAMES = (
    *("fn", "module", "modules", "net", "model", "block", "layer", "attn", "attention", "attn_layers"),
    *("expert", "experts", "gate", "encoder", "decoder", "autoencoder", "transformer", "mlp", "ff"),
    *("text_embed", "vision_embed", "embed_tokens", "wrapper", "backbone"),
)
Candidate = tuple[str, tuple[str, ...]]  # the value as text, and the imports that it needs


@dataclass(frozen=True, slots=True)
class Proposer:
    """Knows the target's module, the classes that were built before, and where configurations live."""

    module: ModuleType
    owner: str
    known: Sequence[Plan]
    configs: Sequence[str]
    overrides: dict[str, str] = field(default_factory=dict)  # learned from assertions that failed
    wanted_parts: list[str] = field(default_factory=list)  # parameters that other modules could serve

    def to_build(self, parameter: Parameter) -> list[Candidate]:
        """Values for a constructor's parameter."""
        plain: list[Candidate] = [
            (v, ()) for v in proposals.for_building(parameter.name, parameter.annotation)
        ]
        if parameter.name in self.overrides:
            plain.insert(0, (self.overrides[parameter.name], ()))
        return _unique([*self.instances(parameter), *plain])

    def optional(self, parameter: Parameter) -> list[Candidate]:
        """What may be needed although it has a default of None: configurations, embeddings."""
        embedding = [("torch.nn.Embedding(100, 64)", ())] if "embed" in parameter.name else []
        return [*embedding, *self.instances(parameter)]

    def to_call(self, parameter: Parameter, docs: Sequence[str], widths: Sequence[str]) -> list[Candidate]:
        """Values for a parameter of forward; `widths` are tensors that the built module hints at."""
        values = proposals.for_calling(parameter.name, parameter.annotation, docs)
        tensor = any("torch.rand" in value for value in values[:1])
        hinted = [*values[:1], *widths, *values[1:]] if tensor else values
        return _unique([*self.instances(parameter), *((value, ()) for value in hinted)])

    def shrunk(self, parameters: Sequence[Parameter]) -> list[Argument]:
        """Small sizes for what has a large default: a test needs no 768 features."""
        found = []
        for parameter in parameters:
            small = self.overrides.get(parameter.name) or proposals.known_size(parameter.name)
            large = isinstance(parameter.default, int) and not isinstance(parameter.default, bool)
            if parameter.name in self.overrides or (
                small and large and (parameter.default > int(small) or parameter.default < 0)
            ):
                found.append(Argument(parameter.name, str(small)))
        return found

    def instances(self, parameter: Parameter) -> Iterator[Candidate]:
        """Objects of the project's own classes, by type, by the parameter's name, by the word `config`."""
        kind = self._class_of(parameter)
        if kind is not None and issubclass(kind, enum.Enum):
            yield from ((f"{kind.__name__}.{m.name}", (_import(kind),)) for m in kind)
        elif kind is not None and issubclass(kind, torch.nn.Module):
            self.wanted_parts.append(parameter.name)
            yield from self._built(lambda plan: issubclass(_loaded(plan), kind))
        elif kind is not None and getattr(kind, "_is_protocol", False):
            yield "None", ()  # whatever has those methods: nothing is a safe guess
        elif kind is not None:
            yield from self._configured(kind)
        lowered = parameter.name.lower()
        if lowered in _CONFIG_NAMES or lowered.endswith(("_config", "_args", "_cfg")):
            for config in self._config_classes():
                yield from self._configured(config)
        elif kind is None and (lowered in _MODULE_NAMES or "Module" in parameter.annotation):
            self.wanted_parts.append(parameter.name)
            yield from self._built(
                lambda plan: plan.target.kind == "module" and plan.target.name != self.owner
            )

    def _class_of(self, parameter: Parameter) -> type | None:
        """The annotated class, if it is the project's own."""
        annotation = parameter.type
        if isinstance(annotation, str):
            names = [part.strip() for part in annotation.replace("Optional[", "").rstrip("]").split("|")]
            annotation = next(
                (v for v in (_dotted(self.module, name) for name in names) if v is not None), None
            )
        return annotation if is_plain_class(annotation) else None

    def _config_classes(self) -> list[type]:
        found = [
            value
            for name, value in vars(self.module).items()
            if isinstance(value, type) and name.endswith(("Config", "Args", "Arguments"))
        ]
        top = self.module.__name__.partition(".")[0]
        for config in self.configs:
            module, _, name = config.partition(":")
            if module.partition(".")[0] == top:
                value = getattr(_imported(module), name, None)
                if isinstance(value, type) and value not in found:
                    found.append(value)
        return sorted(found, key=lambda kind: -_likeness(kind.__name__, self.owner, self.module.__name__))

    def _configured(self, kind: type) -> Iterator[Candidate]:
        """An instance with what it requires and small sizes, then without the small sizes."""
        parameters = constructor(kind)
        required = [
            Argument(p.name, proposals.for_building(p.name, p.annotation)[0])
            for p in parameters
            if p.required
        ]
        small = self.shrunk(parameters)
        for given in ([*required, *small], required):
            text = ", ".join(argument.text for argument in given)
            yield f"{kind.__name__}({text})", (_import(kind),)

    def _built(self, wanted: Any) -> Iterator[Candidate]:
        """Modules that were built for plans of their own: what the file imports comes first, then its own."""
        plans = [plan for plan in self.known if plan.target.kind == "module" and wanted(plan)]
        here, names = self.module.__name__, vars(self.module)

        def distance(plan: Plan) -> tuple[bool, bool, str]:
            near = plan.target.module == here
            return near or plan.target.name not in names, not near, plan.target.key

        for plan in sorted(plans, key=distance)[:12]:
            text = ", ".join(argument.text for argument in plan.build)
            line = f"from {plan.target.module} import {plan.target.name}"
            yield f"{plan.target.name}({text})", (line, *plan.imports)


def _import(kind: type) -> str:
    return f"from {kind.__module__} import {kind.__name__}"


def _loaded(plan: Plan) -> type:
    value = getattr(_imported(plan.target.module), plan.target.name, type(None))
    return value if isinstance(value, type) else type(None)


def _imported(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except Exception:  # a neighbour that cannot be imported is only not proposed; its own target says why
        return None


def _dotted(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _likeness(name: str, *others: str) -> int:
    """How many letters of a class's first word the names share: EncoderConfig is for Encoder."""
    stem = name.removesuffix("Config").removesuffix("Args").lower()
    return sum(len(stem) for other in others if stem and stem in other.lower().replace("_", ""))


def _unique(candidates: Sequence[Candidate]) -> list[Candidate]:
    first: Mapping[str, Candidate] = {text: (text, lines) for text, lines in reversed(candidates)}
    return [first[text] for text in dict.fromkeys(text for text, _ in candidates)]
