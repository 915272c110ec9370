"""
Beside: which files beside a script would Python import in the place of a library?
"""

import os
import sys
from contextlib import suppress
from importlib.machinery import FrozenImporter


def hidden_by_us(folder):
    """(file, name) of each module that is there, and that we have loaded from elsewhere before the
    script asks for it. Python itself loads those that are frozen first, too."""
    files = []
    with suppress(OSError):  # a folder may be open to whoever knows a name in it only
        files = sorted(os.listdir(folder or "."))
    for file in files:
        taken = file.removesuffix(".py")
        beside = os.path.join(folder, file)
        if os.path.isdir(beside):
            beside = os.path.join(beside, "__init__.py")
        loaded = getattr(sys.modules.get(taken), "__file__", None)
        if not loaded or taken == "encodings" or FrozenImporter.find_spec(taken):
            continue
        if os.path.isfile(beside) and os.path.realpath(loaded) != os.path.realpath(beside):
            yield beside, taken
