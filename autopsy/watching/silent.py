"""
Silent faults: what the watch tells whoever looks for faults that make no NaN.

This one listens to nothing. silent.Silent, in the folder silent/, has the same methods: weights
that do not move, a loss that jumps, an overflow that is swallowed. Delete that folder, and autopsy
finds NaN and inf as before.
"""


class NoSilentFaults:
    """The events of a script, in their order within a step."""

    overflows = ()  # swallowed ones

    def wraps(self):
        """(owner, name, around) of functions to wrap: see Hooks.wrap()."""
        return ()

    def called(self, module, tensors):
        """A module was called in training."""

    def wrote(self, line, weights):
        """The script has written into weights by hand."""

    def backward(self, losses):
        """A backward pass begins."""

    def passed(self):
        """A backward pass is over, and no optimizer has made a step yet."""

    def before_step(self, optimizer, losses, norm, moved):
        """Before a step of an optimizer. norm: of all gradients; it may be bad."""

    def stepped(self, optimizer):
        """An optimizer has made its step; the tape still holds it."""

    def over(self):
        """A step is over, with or without an update."""

    def sentences(self):
        """What to say at the end of the script."""
        return ()


def silent_faults(watch):
    try:
        from ..silent import Silent
    except ModuleNotFoundError as error:
        if error.name != "autopsy.silent":
            raise
        return NoSilentFaults()
    return Silent(watch)
