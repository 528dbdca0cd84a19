"""What torch's operations do with a tensor that they are given: look at it, share its memory, or keep it.

What is in none of these tables is unknown, and an unknown operation may keep anything.
"""

VIEWS = frozenset(
    (
        "view", "view_as", "reshape", "reshape_as", "transpose", "permute", "unsqueeze", "squeeze",
        "flatten", "ravel", "unflatten", "narrow", "select", "expand", "expand_as", "broadcast_to", "t",
        "detach", "contiguous", "movedim", "moveaxis", "swapaxes", "swapdims", "diagonal", "unfold", "to",
        "type", "type_as", "float", "half", "double", "bfloat16", "int", "long", "bool", "cpu", "cuda",
        "as_strided", "adjoint", "positive", "resolve_conj", "resolve_neg",
    )
)  # fmt: skip
"""The result shares the memory, or may."""

PARTS = frozenset(("chunk", "split", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit"))
"""The result is a tuple of views."""

SHARING_ATTRIBUTES = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))
DESCRIPTIONS = frozenset(
    ("shape", "device", "dtype", "ndim", "is_cuda", "requires_grad", "layout", "itemsize", "nbytes")
)

ASKS = frozenset(
    (
        "size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous", "item",
        "tolist", "get_device", "is_floating_point", "storage_offset", "ndimension",
    )
)  # fmt: skip
"""The result is no tensor."""

FORGETS = frozenset(
    (
        "add", "sub", "subtract", "sum", "mean", "softmax", "log_softmax", "exp", "sigmoid", "tanh", "relu",
        "sqrt", "rsqrt", "neg", "negative", "clone", "cumsum", "roll", "flip", "repeat", "repeat_interleave",
        "tile", "triu", "tril", "trace", "argmax", "argmin", "any", "all", "isnan", "isinf",
        "eq", "ne", "lt", "gt", "le", "ge", "logical_and", "logical_or", "logical_not", "logical_xor",
        "equal", "allclose", "count_nonzero", "nonzero", "zeros_like", "empty_like", "ones_like", "full_like",
        "rand_like", "randn_like", "new_zeros", "new_ones", "new_empty", "new_full", "masked_fill",
        "index_select", "all_reduce", "all_gather_into_tensor",
        "reduce_scatter_tensor", "all_to_all_single", "broadcast",
    )
)  # fmt: skip
"""A new tensor comes out; autograd keeps at most that or other arguments. Of several, the first counts."""

ALL_FORGOTTEN = frozenset(
    (
        "add", "sub", "subtract", "copy_", "add_", "sub_", "eq", "ne", "lt", "gt", "le", "ge", "equal",
        "allclose", "logical_and", "logical_or", "logical_xor", "all_gather_into_tensor",
        "reduce_scatter_tensor", "all_to_all_single",
    )
)  # fmt: skip
"""None of the tensors that these are given is kept, whatever its place."""

JOINS = frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"))
"""They copy from a list of tensors and keep none of them."""

MAKES_NEW = (
    FORGETS
    | JOINS
    | frozenset(
        (
            "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "pow", "square", "matmul",
            "mm", "bmm", "mv", "dot", "outer", "einsum", "baddbmm", "addmm", "addbmm", "lerp", "addcmul",
            "addcdiv", "where", "log", "log1p", "log2", "expm1", "abs", "clamp", "clip", "maximum", "minimum",
            "amax", "amin", "max", "min", "logsumexp", "logcumsumexp", "norm", "var", "std", "prod",
            "cumprod", "gelu", "silu", "softplus", "sin", "cos", "sign", "round", "floor", "ceil",
            "nan_to_num", "topk", "sort", "argsort", "scatter", "scatter_add", "index_add", "index_fill",
            "index_copy", "index_put", "masked_select", "one_hot", "linear", "layer_norm", "embedding",
            "isfinite", "gather",
            "take_along_dim", "pad", "scaled_dot_product_attention", "cdist", "kron", "remainder", "fmod",
            "reciprocal", "median",
        )
    )
)  # fmt: skip
"""A new tensor comes out; what autograd keeps of the arguments does not matter where it does not record."""

KEEPS_ITS_RESULT = frozenset(
    ("exp_", "sigmoid_", "tanh_", "relu_", "sqrt_", "rsqrt_", "softmax_", "leaky_relu_", "elu_", "celu_")
)
"""In place, with the result kept for the backward pass where it is recorded."""

FILLS = frozenset(("fill_", "zero_", "triu_", "tril_", "fill_diagonal_", "masked_fill_"))
"""In place, and nothing with a gradient comes in if the values are numbers."""

WRITES = frozenset(
    (
        "copy_", "add_", "sub_", "index_add_", "index_copy_", "index_fill_", "scatter_", "scatter_add_",
        "masked_scatter_", "neg_", "clamp_", "clamp_min_", "clamp_max_", "round_", "floor_", "normal_",
        "uniform_", "bernoulli_", "random_", "mul_", "div_", "logical_or_", "logical_and_", "logical_not_",
        "bitwise_or_", "bitwise_and_", "baddbmm_", "addmm_", "index_put_",
    )
)  # fmt: skip
"""In place; the tensor itself comes out."""

RECORDS_ITSELF = frozenset(("clamp_", "clamp_min_", "clamp_max_", "mul_", "div_", "baddbmm_", "addmm_"))
"""Of those, the ones of which autograd may keep an operand or the tensor's old values."""

HARMLESS_BUILTINS = frozenset(("print", "len", "isinstance", "id", "repr", "str", "float", "int", "bool"))
