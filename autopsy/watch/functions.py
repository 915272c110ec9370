"""
Functions: what does a function of torch do with what it is given, by its name?
"""

import re

RANDOM = re.compile(
    "empty|rand|normal|uniform|bernoulli|multinomial|dropout|exponential|poisson|gumbel"
)
WRITES = re.compile(r"(?!requires_grad)[a-z]\w*[a-z0-9]_|__(setitem|i(add|sub|mul|truediv|pow))__")
# Attributes, and what only torch itself calls
NOTHING_NEW = re.compile(r"backward|__set__.*|__get__(?!(m?T|H|real|imag)$).*|_(?!_|.*pack).*")
FOREACH = re.compile(r"_foreach_\w+_")  # writes into a list of tensors
COPIES = re.compile("to|type|half|float|double|bfloat16|cpu|cuda|clone|contiguous")
LENDS = ("numpy", "data_ptr", "__dlpack__")  # others may write into this memory, unseen
READS = ("item", "tolist", "numpy", "__float__", "__repr__", "__format__")
ASKS = ("isnan", "isinf", "isfinite", "ne", "eq", "__ne__", "__eq__")  # is it bad? x != x
