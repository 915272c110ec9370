"""
Graph parts: what was a result made of, behind views of it, and on which weights does it depend?

moving_target.py and trained_critic.py ask it of the two sides of a difference, and of a product.
"""

import re

from ...watch.graph import graph_of

VIEWS = re.compile("(Squeeze|Unsqueeze|View|Where|Expand|Clone|ToCopy|Select|Slice)Backward")
REWARDS = re.compile(r"reward|discount|\bgamma\b", re.I)  # in a script


def without_views(node):
    """The first node before it that computes something, or None."""
    while node is not None and VIEWS.match(node.name()):
        node = only_part(node)
    return node


def only_part(node):
    """What alone has a graph of what it was made of, or None."""
    parts = [part for part, _ in node.next_functions if part]
    return parts[0] if len(parts) == 1 else None


def weights_before(node):
    """The ids of the leaves that it depends on."""
    nodes = graph_of([node] if node else [])
    return {id(n.variable) for n in nodes if hasattr(n, "variable")}
