"""
Weight history: what was read of one weight, and of one optimizer, and what that shows of them.

__init__.py fills it in, reasons.py asks it. What is read of a weight stays on its device.
"""

from weakref import ref

import torch

from ....tensors import few, numbers_of

READ = 3  # times at least
FAR = 100  # steps
SAMPLE = 64  # numbers of a tensor that are followed


class OptimizerHistory:
    """What was seen of an optimizer, which may no longer exist at the end."""

    def __init__(self, optimizer, names):
        self.alive, self.name = ref(optimizer), type(optimizer).__name__
        self.made = names.of_optimizer(optimizer)  # its name, and the line that made it
        self.steps = 0
        self.first = self.last = 0  # of all steps of all optimizers: its first and its last one
        self.had_gradient = False  # whether a parameter had a gradient at any of them
        self.highest = 0.0  # rate
        self.end = ""  # of the graph of all its weights
        # The weights whose gradient has become 0 though the loss is not; since when; where
        self.dead = None
        # At how many steps was each gradient 0, and at which was one not, the last time?
        self.zeros, self.live = 0, -1
        self.orphans = 0  # parameters without a gradient, which no module holds
        self.empty = False  # is one of its groups?
        self.is_followed_closely = True  # is it one of the first few?
        self.was_repeated = False  # for weights without a gradient on which the loss depends?


class WeightHistory:
    """What was read of one parameter."""

    def __init__(self, p):
        self.alive = ref(p)
        self.name = ""
        self.module = None  # that holds it: a weak reference
        self.unlisted = ""  # why no parameters() lists it
        self.optimizer = None
        self.other_optimizer = None  # that holds it, too
        self.idle = ""  # the optimizer that holds it and has made no step
        self.without = ""  # what its forward ran in, in place of a graph
        self.frozen = False  # on purpose
        self.end = ""  # of its graph, or of its gradient
        self.is_off = False  # that is meant
        self.read_in_train_mode = False  # has it been read in train() mode?
        self.may_have_masters = False  # it may have wider ones
        self.norm_before = []  # its norm before the first step of its optimizer
        self.norms = []
        self.grads = []  # None: no gradient
        self.rate = 0.0
        self.steps = []
        self.first = self.last = self.update = None  # of a sample

    @property
    def p(self):
        """The parameter; None if it is gone."""
        return self.alive()

    @property
    def read_enough(self):
        """Whether it was read often enough, or over many steps (if it was made late)."""
        far = len(self.steps) > 1 and self.steps[-1] - self.steps[0] > FAR
        return far or len(self.norms) >= READ

    @property
    def never_changed(self):
        """Whether it has not moved."""
        return self.read_enough and len({*self.norm_before, *self.norms}) == 1

    @property
    def had_nonzero_gradient(self):
        """Whether it had a gradient that was not 0 at any read."""
        return any(self.grads)

    @property
    def always_had_gradient(self):
        """Whether it had a gradient that was not 0 at each read."""
        return self.read_enough and all(self.grads)

    @property
    def got_gradient_late(self):
        """Whether it had none at first, and then one at each of several reads."""
        last = [grad for grad in self.grads if grad is not None]
        late = len(self.grads) - len(last) >= READ and len(last) > 1 and all(last)
        return late and self.grads[-len(last) :] == last

    @property
    def gradient_always_present(self):
        """Whether it had a gradient at each read, be it 0."""
        return self.read_enough and None not in self.grads

    @property
    def never_had_gradient(self):
        """Whether it had no gradient at any read."""
        return not any(grad is not None for grad in self.grads)

    def rounded_away(self):
        """The share of sampled numbers with an update that did not change, because rounding loses
        the update."""
        if self.update is None or not (moves := self.update != 0).any():
            return 0.0
        lost = (self.last.double() - self.update).to(self.last.dtype) == self.last
        return float((lost & moves & (self.first == self.last)).sum() / moves.sum())

    def sample(self, optimizer, group):
        """Keep some of its numbers, and what a step of torch's own optimizers subtracts from
        them."""
        p, state = self.p, optimizer.state.get(self.p, {})
        if not type(optimizer).__module__.startswith("torch.optim"):
            wide = [t for t in state.values() if isinstance(t, torch.Tensor) and t.shape == p.shape]
            self.may_have_masters = any(t.itemsize > p.itemsize for t in wide)
            return

        def some(t):
            flat = numbers_of(t.detach()).reshape(-1)
            return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()

        if "exp_avg_sq" in state and "betas" in group:
            beta1, beta2 = group["betas"]
            mean = some(state["exp_avg"]).double() / (1 - beta1**self.optimizer.steps)
            square = some(state["exp_avg_sq"]).double() / (1 - beta2**self.optimizer.steps)
            update = mean / (square.sqrt() + group["eps"])
        elif state.get("momentum_buffer") is not None:
            update = some(state["momentum_buffer"]).double()
        elif isinstance(optimizer, torch.optim.SGD):
            update = some(p.grad).double()
        else:
            return
        self.last, self.update = some(p), update * group["lr"]
        self.first = self.last if self.first is None else self.first


def names_of(weights, names):
    """The script's names for a few of them."""
    some = [w.name if w.unlisted else names.of(w.p) for w in weights[:4]]
    return few([*some, *weights[4:]], 4)
