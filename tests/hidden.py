"""Linux without what Windows lacks: `python hidden.py SCRIPT ARGS...`

Hidden are the modules in UNIX, and of os, signal, time and errno every name that a file of ours
mentions (as an attribute or as a string) and that is not in WINDOWS. Where a call means something
else there, it fails here too: see `like_windows`.
"""

import ast
import builtins
import concurrent.futures
import contextlib
import errno
import fcntl
import functools
import io
import logging.handlers  # noqa: F401 what others import late must not miss a name
import multiprocessing
import os
import runpy
import signal
import sys
import time
import types
from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import torch.distributed.tensor
import torch.utils.data  # noqa: F401
import torchvision.transforms.v2  # noqa: F401
import tqdm  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
UNIX = "crypt curses fcntl grp nis posix pty pwd readline resource spwd syslog termios tty"
WINDOWS = {
    os: "O_CREAT O_EXCL O_RDONLY O_RDWR O_WRONLY W_OK _exit access close cpu_count devnull dup2 "
    "environ fsencode fspath fsync getcwd getpid link listdir lseek makedirs mkdir name open "
    "path read remove rename replace rmdir sep stat symlink truncate unlink walk write",
    signal: "SIGINT SIGTERM SIG_IGN getsignal signal",
    time: "monotonic perf_counter process_time sleep strftime time",
    errno: "EACCES EAGAIN EDQUOT EINVAL ENOSPC EPIPE",
}


def mentioned():
    """Every attribute and every string of our files."""
    for path in ROOT.glob("**/*.py"):
        if path.relative_to(ROOT).parts[0] not in ("tests", "bench", "failures", "docs", ".venv"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                yield getattr(node, "attr", None) or getattr(node, "value", None)


def hide(then=None):
    """Take the names away; then() is called at the end."""
    names = {name for name in mentioned() if isinstance(name, str)}
    hidden = [
        (module, name)
        for module, known in WINDOWS.items()
        for name in names & set(vars(module)) - set(known.split())
    ]
    for module, name in hidden:
        if not name.startswith("__"):
            delattr(module, name)
    sys.modules.update(dict.fromkeys(UNIX.split()))
    like_windows()
    if then:
        then()


def like_windows():
    fsync, replace, plain_open = os.fsync, os.replace, builtins.open

    def locking(descriptor, mode, count):
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if mode == 2 else 0), count)

    def fsync_what_is_written(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & 3 == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        fsync(descriptor)

    def opened():
        for link in Path("/proc/self/fd").glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another thread has closed it since
                yield os.readlink(link)

    def replace_what_is_closed(source, target):
        if {os.path.realpath(source), os.path.realpath(target)} & set(opened()):
            raise PermissionError(errno.EACCES, "it is open", source)
        replace(source, target)

    @functools.wraps(plain_open)
    def open_with_encoding(file, mode="r", buffering=-1, encoding=None, *args, **kwargs):
        if "b" not in mode and encoding in (None, "locale"):
            raise UnicodeError(f"{file} would be in the code page of this machine")
        return plain_open(file, mode, buffering, encoding, *args, **kwargs)

    class Pool(concurrent.futures.ProcessPoolExecutor):
        def __init__(self, workers, mp_context, initializer):
            initializer = functools.partial(hide, initializer)
            super().__init__(workers, mp_context, initializer)

    sys.modules["msvcrt"] = types.SimpleNamespace(LK_LOCK=1, LK_NBLCK=2, locking=locking)
    os.fsync, os.replace = fsync_what_is_written, replace_what_is_closed
    builtins.open = io.open = open_with_encoding
    concurrent.futures.ProcessPoolExecutor = Pool
    multiprocessing.set_start_method("spawn", force=True)
    spawn = multiprocessing.get_context("spawn")
    multiprocessing.get_context = lambda method=None: spawn


if __name__ == "__main__":
    import hidden  # by this name a process of its own finds it too

    hidden.hide()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
