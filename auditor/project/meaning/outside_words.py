"""Names of functions and methods of others, and what each says of what it is given."""

import ast
import re

from auditor.flow.effects import BORROWED, PERHAPS_SAME, SAME, Treatment
from auditor.ir.ops import Call

HOLDING = frozenset({"ModuleList", "ModuleDict", "Sequential"})
"""Modules of torch that are made of other modules."""


def of_numbers(dotted: str | None) -> bool:
    """A function of a library of numbers: `torch.add(a, b, out=c)` puts nothing into `torch`."""
    return dotted is not None and dotted.partition(".")[0] in ("torch", "numpy", "math", "triton")


MEMORY = frozenset(
    {"torch.Tensor", *(f"torch.{made}" for made in ("empty", "zeros", "ones", "full", "randn", "rand"))}
)
"""What a table is that says of nothing in it where it lies."""


def of_a_tensor(call: ast.Call, dotted: str) -> bool:
    """`rows.view_as(other)` of what is known to be a tensor, not `torch.Tensor.view_as(rows, other)`:
    its first argument is not what the result is a view of."""
    of = getattr(call.func, "value", None)
    return dotted.startswith("torch.Tensor.") and getattr(of, "attr", getattr(of, "id", "")) != "Tensor"


ITSELF = frozenset({"copy", "__await__", "__enter__", "__iter__", "resolve", "absolute", "manual_seed"})
"""Methods of an object that return it, or another name of the same path."""

USING = re.compile(
    r"_*(?:copy|read|write|run|compute|forward|prefill|decode|encode|generate|fill|dump|print|log|check|valid|verif|is"
    r"|has|can|should|count|hash|format|parse|gather|memcpy|memset|extract(?:all)?|compare|assert|measure|ping|query|probe|warm"
    r"|score|reward|metric|grade|judge|eval|evaluate|rank|report|display|show|describe|inspect|debug|warn|announce"
    r"|size|length|exists|checksum|digest|fingerprint|estimate|weigh)"
    r"(?:_|$|[a-z]*_)"
)
"""Names of functions that work with what they are given and hand it to nobody."""

_WRITING_OUT = re.compile(r"save")


def writes_out(name: str, dotted: str | None, an_object: bool) -> bool:
    """A function of a library that writes what it is given into a file: `numpy.save(file, array)`. One of an
    unknown library might note a tensor or a number."""
    if dotted is None or not _WRITING_OUT.match(name):
        return False
    return an_object or of_numbers(dotted) or dotted.partition(".")[0] == "safetensors"


ON_STREAMS = frozenset({"wait_event", "wait_stream", "record_event", "record_stream", "elapsed_time"})
"""Methods of torch's streams, events and tensors that are told another one, and keep it no longer than the
work lasts that is queued by then."""

EXPORTING = re.compile(
    r"to_(?:sql|csv|json|parquet|pickle|excel|html|feather|hdf5?|markdown|latex|string|xml|stata|netcdf|zarr|yaml|toml"
    r"|orc|file|stream|buffer|wav)|savefig|load|loads|(?:up|down)load(?:_\w+)?|(?:put|get)fo|(?:stor|retr)binary"
)
"""Methods of whatever object that write themselves into a file or a connection, or read from it."""

NUMBERED = frozenset({"os", "struct", "time", "socket"})
"""Modules whose functions are told offsets and sizes, and keep none: `os.pwrite(fd, data, slot * size)`."""

RUNNING = frozenset({"submit", "run_in_executor", "to_thread"})
"""Methods that have a function run with the arguments behind it."""

LOOKING_UP = frozenset({"pop", "get", "index", "count"})

WAITING = frozenset({"wait"})
"""Methods that are functions of asyncio too, and give nothing back where they are not."""

COPYING = frozenset({"copy", "copy_from", "copyto", "copy_into"})

DIGESTS = frozenset({"digest", "hexdigest", "intdigest"})
"""What a hash that was updated is asked for."""

READING = frozenset({"read", "readline", "readlines", "write", "writelines", "getvalue", "seek", "tell",
                     "flush", "namelist", "getnames", "recv", "send", "sendall", "json"})  # fmt: skip
"""Methods that are never about who has the file: what they return are texts and numbers."""

ASKING = re.compile(r"(?:is|has|can|count|num|len|size)(?:_\w+)?")
"""Methods whose answer is a truth or a number."""

MEASURING = re.compile(
    r"(?:get_)?(?:\w+_)?(?:size|shape|dtype|nbytes|n_bytes|length|numel|device|layout|format|ndim|data_ptr)"
)
"""Methods of a tensor, or of an object around memory, that say what it is like and where it lies:
`memory.get_size()`."""

CONTENT = frozenset({"get", "unwrap"})
"""Methods that take out of an outcome what it stands for: `status.get()`."""

ARRAYS = frozenset({"tensor", "as_tensor", "asarray", "array", "LongTensor", "IntTensor"})
CARRIERS = frozenset({"item", "tensor", "as_tensor", "asarray", "array", "from_numpy", "cat", "concat",
                      "concatenate", "stack", "clone", "contiguous", "to", "tolist", "copy", "long", "int",
                      "cpu",
                      "cuda", "unique", "sort", "flip", "repeat_interleave", "pin_memory", "type", "roll",
                      "hstack"})  # fmt: skip


DTYPES = frozenset({"float16", "half", "bfloat16", "float32", "float", "float64", "double", "int8", "uint8",
                    "int16", "int32", "int", "int64", "long", "bool"})  # fmt: skip


def converts(call: Call) -> bool:
    """`buffer.to(torch.float16)`, of a type that is written out."""
    told = [*call.at.args, *(keyword.value for keyword in call.at.keywords)]
    return call.method in ("to", "type") and any(
        isinstance(each, ast.Attribute) and each.attr in DTYPES and ast.unparse(each.value) == "torch"
        for each in told
    )


def makes(name: str) -> bool:
    """Whether a call makes an object: `Lease(...)`, `self._lease_class(...)`."""
    return (name[:1].isupper() and name != name.upper()) or name.endswith(("_class", "_cls", "_factory"))


def carried(name: str, table: Treatment | None) -> Treatment:
    """Slot numbers keep the obligation through copies and rearrangements, not through sums and sizes."""
    if table == SAME or name in CARRIERS:
        return SAME
    return BORROWED if table is not None else PERHAPS_SAME
