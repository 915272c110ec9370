"""
Files: where the full report goes.

The finding is on the screen before anything is written. The report goes to a new file, which takes
its name when it is whole. What is no report of autopsy keeps its bytes: a link, a pipe, a folder,
the script itself, somebody's notes.
"""

import os
from contextlib import suppress

MARK = "(autopsy may write over this file)"


def save(path, text):
    """Write the report. Returns "", or why it was not written."""
    folder, name = os.path.split(path)
    if os.path.lexists(path):
        if os.path.islink(path) or not os.path.isfile(path):
            return f"{path} is a link, a folder or a device"
        if not _is_a_report(path):
            return f"{path} is no report of autopsy"
    new = None
    try:
        name = os.path.join(folder, f"{name}.{os.getpid()}.new")
        with open(name, "x", encoding="utf-8", errors="backslashreplace") as file:
            new = name
            file.write(f"{text}\n{MARK}\n")
        os.replace(new, path)
    except OSError as error:
        if new:
            with suppress(OSError):
                os.remove(new)
        return f"{path}: {error.strerror or error}"
    return ""


def _is_a_report(path):
    """Whether it is empty, or ends with our mark."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 200))
        tail = file.read().rstrip()
        return not tail or tail[-len(MARK) :] == MARK.encode()
    return False
