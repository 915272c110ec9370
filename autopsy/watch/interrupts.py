"""
Interrupts: does an exception belong to the script, although it was raised in code of ours?
"""

import sys
import traceback

from ..frames import HERE, LIBRARY, TORCH


def came_from_another_thread(error):
    """Whether a thread of the script has raised this here (a time limit, say): no function that
    was called here knows an exception of its kind."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    in_library = file.startswith(LIBRARY) and "-packages" not in file
    called = in_library or file.startswith((HERE, TORCH))
    package = type(error).__module__.partition(".")[0]
    known = package in ("torch", *sys.stdlib_module_names) and type(error) is not TimeoutError
    return called and not known


class NoEvidence:
    """`with no_evidence`: what fails within proves nothing, and is passed over."""

    def __enter__(self):
        pass

    def __exit__(self, kind, error, _):
        return isinstance(error, Exception) and not came_from_another_thread(error)


no_evidence = NoEvidence()
