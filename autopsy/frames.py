"""
Frames: which line of the script is it?

The innermost line that is neither torch's nor ours; if a library owns it, also the line of the
script that called the library.
"""

import linecache
import os
import re
import sys
from functools import cache, lru_cache
from textwrap import shorten

import torch

FOLDER = os.path.dirname(__file__)
PACK = os.path.dirname(FOLDER)  # a file, where the folder was packed into one
# None of its lines is the script's.
HERE = os.path.join(PACK if os.path.isfile(PACK) else FOLDER, "")
TORCH = os.path.dirname(torch.__file__)
DISTRIBUTIONS = os.path.join(TORCH, "distributions")
LIBRARY = os.path.dirname(os.__file__)
# Of torch's own files, those whose arithmetic is no operation that the script has called.
NAMED = re.compile(re.escape(TORCH) + ".(nn.utils.(parametriz|weight_norm|spectral)|distributions)")
# Of a mode or a subclass: torch calls them, for a call of the script's.
HANDLERS = ("__torch_function__", "__torch_dispatch__")


class Line(str):
    """file:line in function. Of a library, the line of the script that called it follows."""

    script = ""  # the script's line, without the library's

    @property
    def is_of_library(self):
        return self != self.script


NOWHERE = Line()


def first_line_of(error):
    """The error's type and first line; if that is long, its first sentence."""
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if len(text) > 160:
        text = re.split(r"(?<=[.;!?])\s", text)[0]
    return shorten(text.rstrip(":"), 400, placeholder=" ...")


def frames_now():
    """The frames of the calls under way, the innermost first."""
    frame = sys._getframe(1)
    while frame:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def script_frame():
    """The innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((HERE, TORCH)):
        frame = frame.f_back
    return frame


def frames_in(text):
    """The same from the text of traceback.format_stack()."""
    return re.findall(r'File "(.+)", line (\d+), in (\S+)', "".join(text))[::-1]


@cache
def _kind(file):
    """(Is a line of this file told? Is it the script's own?)"""
    told = bool(NAMED.match(file)) or not file.startswith((HERE, TORCH, "<"))
    return told, not file.startswith((LIBRARY, TORCH)) and "-packages" not in file


def is_own(file):
    """Whether it is a file of the script, not of a library."""
    return all(_kind(file))


def script_frames(frames):
    """The lines of libraries, without torch's, then the line of the script that called them."""
    found = []
    for frame in frames:
        told, own = _kind(frame[0])
        if told and frame[2] not in HANDLERS:
            found.append(frame)
            if own:
                break
    return found


def script_frames_now():
    """The same of the calls under way. It runs once a call: only what is told is looked at."""
    frame, found, own = sys._getframe(1), [], False
    while frame and not own:
        code = frame.f_code
        told, own = _kind(code.co_filename)
        told = told and code.co_name not in HANDLERS
        if told:
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        own = told and own
        frame = frame.f_back
    return tuple(found)


def line_of(frames):
    """file:line in function: of a library, then of the script that called it."""
    at = [f"{os.path.basename(file)}:{n} in {name}" for file, n, name in script_frames(frames)]
    line = Line(", called from ".join([*at[:1], *at[1:][-1:]]))
    line.script = at[-1] if at else ""
    return line


def call_at(file, number):
    """The source from this line on, until its parentheses are closed, without comments."""
    lines = [line.partition("#")[0] for line in linecache.getlines(file)[number - 1 : number + 9]]
    for end in range(1, len(lines) + 1):
        text = "".join(lines[:end])
        if text.count("(") <= text.count(")"):
            return text
    return "".join(lines)


@lru_cache(1 << 12)
def _line(frames):
    return line_of(frames)


def line_now():
    """The script's line that is under way."""
    return _line(script_frames_now())


def code_of(frames):
    """The source of the script's file with the last of these lines."""
    return "".join(linecache.getlines(frames[-1][0])) if frames else ""


@cache
def call_from(frame):
    """Calls a function as if from this line of the script: every traceback then says so."""
    file, line, name = frame
    space = {}
    text = "\n" * (line - 1) + "def f(call, *args, **kwargs): return call(*args, **kwargs)"
    exec(compile(text, file, "exec"), space)
    space["f"].__code__ = space["f"].__code__.replace(co_name=name)
    return space["f"]
