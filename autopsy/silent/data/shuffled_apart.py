"""
Shuffled apart: are inputs and labels brought into two different orders?

`np.random.shuffle(images); np.random.shuffle(labels)` gives each sample the label of another one,
and so does `x[torch.randperm(n)], y[torch.randperm(n)]`: nothing fails, and nothing is learnt. Told
are two such lines of one block whose names are those of the inputs and of the labels of one set
(`train_images` and `train_labels`, `x` and `y`), or two parts of one pair after a state was asked
for (`get_state()`). No word if a generator is seeded or set between the two, or if the labels alone
are shuffled.
"""

import ast
import os
import re

from ...tensors import few
from ...watch.events import ReadsFiles
from ..shared.syntax import tree_of

INPUTS = {"x", "xs", "data", "image", "img", "input", "feature", "sample", "text", "sentence"}
LABELS = {"y", "ys", "label", "target", "class", "gt", "truth"}
BARE = {"x", "y", "xs", "ys", "X", "Y"}
SUPERVISED = re.compile(r"(?i)cross_?entropy|mse_?loss|l1_?loss|nll_?loss|bce")
ORDERS = ("randperm", "permutation")  # calls that make an order
SEEDS = re.compile(r"seed|set_state|setstate|set_rng_state|Generator|default_rng|Random(State)?\(")
STATES = re.compile(r"\b(get_state|getstate|get_rng_state)\b")


class ShuffledApart(ReadsFiles):
    """Pairs of statements that shuffle inputs and labels."""

    def sentences(self):
        for file in self.files:
            for block in _blocks(tree_of(file)):
                for one, two in _pairs(block):
                    is_bare = {one.code, two.code} <= BARE
                    if is_bare and not SUPERVISED.search(ast.unparse(tree_of(file))):
                        continue  # two clouds of points, which nothing pairs
                    lines = f"{os.path.basename(file)}:{one.line} and :{two.line}"
                    if one.line == two.line:
                        lines = f"{os.path.basename(file)}:{one.line}"
                    yield (
                        f"{lines} bring {few([one.code, two.code])} into two different orders: "
                        "each sample gets the label of another one; make one order, and take both "
                        "in it"
                    )


class Shuffle:
    """What one call brings into an order of its own."""

    def __init__(self, shuffled, line):
        self.code, self.line = ast.unparse(shuffled), line
        name = re.sub(r"\.\w+\(\)$", "", self.code)  # train[0].numpy()
        name = name.removesuffix("]")
        name, _, self.part = name.partition("[")
        self.name = name
        words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
        singular = [word[:-1] if word[:-1] in INPUTS | LABELS else word for word in words]
        self.is_input = not INPUTS.isdisjoint(singular)
        self.is_label = not LABELS.isdisjoint(singular)
        self.others = [word for word in singular if word not in INPUTS | LABELS]

    def belongs_to(self, other, asked):
        """Whether they are the inputs and the labels of one set. asked: was a state asked for?"""
        if asked and self.name == other.name:
            return {self.part, other.part} == {"0", "1"}
        inputs, labels = (self, other) if self.is_input else (other, self)
        one_of_each = inputs.is_input and labels.is_label and not inputs.is_label
        return one_of_each and not labels.is_input and self.others == other.others


def _blocks(tree):
    """Rows of statements that run one after the other."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _pairs(block):
    """Pairs of shuffles of one block with nothing between that would make their orders equal."""
    open_, asked = [], False  # asked: was the state of a generator asked for?
    for statement in block:
        code = ast.unparse(statement)
        asked |= bool(STATES.search(code))
        if SEEDS.search(code):
            open_ = []
            continue
        for new in _shuffles(statement) if isinstance(statement, ast.Expr | ast.Assign) else ():
            yield from ((old, new) for old in open_ if old.belongs_to(new, asked))
            open_.append(new)


def _shuffles(statement):
    value = statement.value
    if isinstance(statement, ast.Expr):
        is_shuffle = isinstance(value, ast.Call) and _name(value.func) == "shuffle"
        if is_shuffle and len(value.args) == 1:
            yield Shuffle(value.args[0], statement.lineno)
        return
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    for part in parts:
        order = getattr(part, "slice", None)
        if isinstance(order, ast.Call) and _name(order.func) in ORDERS:
            yield Shuffle(part.value, statement.lineno)


def _name(func):
    return getattr(func, "attr", getattr(func, "id", ""))
