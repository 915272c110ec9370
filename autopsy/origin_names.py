"""
Sources: the names of places where a bad number was before an operation of the step used it.

Names only: it asks nothing. Who held the number, the locator and the replay say.
"""

CONSTANT = "a number made outside of torch, or before the watch"
WRITTEN = "a number that the script writes"  # fill_, full, ...: a bad scalar, and no bad tensor
OUTSIDE = "a tensor from outside of torch (NumPy, a file)"
PYTHON = "a tensor of Python's numbers"
OPAQUE = "memory of torch.empty that no operation of torch wrote"
UNKNOWN = "what compiled code or another library made"
EARLIER = "a tensor of an earlier step"
STATE = ("parameter ", "buffer ", "attribute ", "old gradient ", EARLIER)
