"""
Graph: the nodes of autograd that made some tensors.
"""

from math import inf


def nodes_of(tensors, most=inf):
    """The nodes of the graph that made these tensors, the last first, and at most so many."""
    return graph_of([t.grad_fn for t in tensors if t.grad_fn], most)


def graph_of(nodes, most=inf):
    """These nodes of a graph, and those before them."""
    nodes = dict.fromkeys(nodes)
    left = [*nodes]
    for node in left:
        for other, _ in node.next_functions:
            if other and other not in nodes and len(nodes) < most:
                nodes[other] = None
                left.append(other)
    return left


def maker_of(node, known):
    """What made the tensor that this node stands for, if the script still holds that. known:
    {tensor: what made it}."""
    return next((made for t, made in known.items() if t.grad_fn is node), None)
