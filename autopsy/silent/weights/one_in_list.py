"""
One in list: is one layer meant to be several?

[nn.Linear(8, 3)] * 4 makes one layer and lists it four times. Nothing fails: all entries of the
nn.ModuleList share their weights. It is told where the line of the script that builds the list
multiplies a list of calls, and the entry that comes again has a matrix to train. A list of a name
([self.layer] * 4), a layer that another module holds too, and a source that speaks of sharing or of
iterations mean it.
"""

import ast
import linecache
import re
from weakref import WeakKeyDictionary

from ...frames import line_of, script_frames_now
from ...watch.events import Events
from ...watch.names import modules
from ..shared.syntax import covers, tree_of

MEANT = re.compile(
    "shar(e|ing)|\\bcommon\\b|tied|tying|siamese|albert|universal|reus(e|ing)|recurr|recursi|unroll|iterati"
    "|refine|same (weight|param|layer|block)|equilibri|looped|one block|\\bdeq\\b", re.I
)  # fmt: skip
REPEATS = re.compile("step|iter|loop|recur|unroll|time|repeat", re.I)
FETCHES = re.compile("_*get|_*fetch|_*find|_*lookup|pop$|next$")  # they may return what exists
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NEAR = 4  # lines: a comment may say that it is meant


class OneInList(Events):
    """Entries of a list of modules that are one object."""

    def __init__(self, watch):
        self.names, self.recorder = watch.names, watch.recorder
        self.built_at = WeakKeyDictionary()  # list in which an entry comes again: its frame

    def built(self, made):
        entries = [*getattr(made, "_modules", {}).values()]
        if len(entries) == len({*map(id, entries)}):
            return
        frames = script_frames_now()
        if len(frames) == 1:  # not by a library
            self.built_at[made] = frames[0]

    def sentences(self):
        if not (self.built_at and self.recorder.steps):
            return
        told = {}
        for root in list(self.names.roots):
            for path, module in root.named_modules():
                if frame := self.built_at.get(module):
                    for text in _repeated(module, path, frame):
                        told[text] = True
        yield from told


def _repeated(container, path, frame):
    """A sentence for each entry that comes again, if one of a kind was meant."""
    file, number, _ = frame
    entries = [*container._modules.items()]
    again = {}
    for key, module in entries:
        again.setdefault(module, []).append(key)
    again = {m: keys for m, keys in again.items() if len(keys) > 1 and _learns(m)}
    if not again or not (text := _multiplied(file, number, type(container))):
        return
    outside = {c for owner in modules() if owner is not container for c in owner._modules.values()}
    for module, keys in again.items():
        if module not in outside:
            name = ".".join(filter(None, (path, keys[0])))
            yield (
                f"{name} and {len(keys) - 1} more of its list are the same "
                f"{type(module).__name__}: {text} at {line_of([frame])} makes it once and lists it "
                f"{len(keys)} times, so they share their weights: if each is to have its own, "
                "write [... for _ in range(n)]"
            )


def _learns(module):
    """Whether it has a matrix that is trained: to share an activation does no harm."""
    matrices = [p for p in module.parameters() if p.dim() > 1] if module else []
    return any(p.requires_grad for p in matrices)


def _multiplied(file, number, kind):
    """The list of calls that this line multiplies to build a container; or ""."""
    around = [node for node in ast.walk(tree_of(file)) if covers(node, number)]
    names = {"__init__", *(base.__name__ for base in kind.__mro__)}
    calls = [node for node in around if isinstance(node, ast.Call) and _name(node) in names]
    functions = [tree_of(file), *(node for node in around if isinstance(node, FUNCTIONS))]
    outermost = [node for node in around if isinstance(node, (ast.ClassDef, *FUNCTIONS))]
    first, last = number - NEAR, number + NEAR
    if outermost:
        first, last = min(first, outermost[0].lineno), max(last, outermost[0].end_lineno)
    code = "".join(linecache.getlines(file)[max(0, first - 1) : last])
    if MEANT.search(code):
        return ""
    products = []
    for given in [given for call in calls for given in call.args]:
        given = given.value if isinstance(given, ast.Starred) else given
        parts = [given]
        if isinstance(given, ast.Name):
            parts = _assigned(given.id, functions[-1])
        products += [product for part in parts for product in _products(part)]
    if products and all(_makes_one(*product) for product in products):
        code = ast.unparse(products[0][0])
        return re.sub(r"\s+", " ", code)
    return ""


def _name(call):
    """The last part of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _assigned(name, function):
    """What is assigned to this name, or added to it, in a function."""
    found = []
    for node in ast.walk(function):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        one = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if one and isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value:
            found.append(node.value)
    return found


def _products(part):
    """(product, its list, the other factor) of each list that is multiplied."""
    for node in ast.walk(part):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for several, times in ((node.left, node.right), (node.right, node.left)):
                if isinstance(several, ast.List | ast.Tuple):
                    yield node, several, times


def _makes_one(product, several, times):
    """Whether each entry is made by a call, and the factor counts no repetitions."""
    code = ast.unparse(times)
    names = [_name(x) for x in several.elts if isinstance(x, ast.Call)]
    made = len(names) == len(several.elts) and not any(FETCHES.match(name) for name in names)
    return made and not REPEATS.search(code)
