"""New Python processes without the seconds that importing torch takes: forks of one that has imported libraries.

That one has imported nothing of the product.  What tests imports itself, or memory, starts afresh by :mod:`subprocess`.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

LIBRARIES: Final = (
    "torch", "torchvision", "numpy", "scipy.special", "scipy.stats", "PIL.Image", "safetensors.torch", "jaxtyping",
    "pydantic_settings", "fastapi", "uvicorn", "uvloop", "httptools", "multipart", "httpx", "orjson", "jinja2",
    "onnxscript", "torch._dynamo", "torch.onnx",
)  # fmt: skip
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
FRESH: Final = subprocess.Popen
PYTHON: Final = sys.executable


class Process(subprocess.Popen[str]):
    """A process of this Python, with ``-m`` and a module or ``-c`` and code; any other starts afresh."""

    def _execute_child(self, *given: Any) -> None:
        start = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(start).bind(*given).arguments
        words = [os.fspath(word) for word in asked["args"]]
        if words[0] != PYTHON or not {"-c", "-m"} & {*words}:
            start(*given)
            return
        pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)]
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        about = {"words": words[1:], "environment": environment, "cwd": str(asked["cwd"] or Path.cwd())}
        self.pid = _first()({**about, "leads": asked["start_new_session"], "numbers": [0, 1, 2]}, files)
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in names))  # type: ignore[attr-defined]


def run(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """:func:`subprocess.run` by a :class:`Process`."""
    with mock.patch.object(subprocess, "Popen", Process):
        return subprocess.run(command, **options)


@cache
def _first() -> Callable[[dict[str, Any], Sequence[int]], int]:
    """Start the process that the others are forks of."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # As psc-serve has it when it imports torch.
    root = Path(__file__).parents[1]
    first = FRESH(command, cwd=root, env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    _control(_PR_SET_CHILD_SUBREAPER, 1)

    @atexit.register
    def end() -> None:
        ours.close()
        first.wait()

    return partial(_ask, ours)


def _control(option: int, value: object) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _ask(link: socket.socket, about: dict[str, Any], files: Sequence[int]) -> int:
    message = json.dumps(about).encode()
    socket.send_fds(link, [len(message).to_bytes(8, "big")], files)
    link.sendall(message)
    return int.from_bytes(link.recv(8), "big")


def _fork_on_request(link: socket.socket) -> tuple[dict[str, Any], Sequence[int]] | None:
    """Fork a process for each request, and return it there; nothing where nobody asks any more.

    A fork of a fork, whose parent ends: so it becomes a child of the process that asked.
    """
    while True:
        size, files, _, _ = socket.recv_fds(link, 8, 64)
        if not size:
            return None
        about = json.loads(link.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        between = os.fork()
        if not between:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            link.sendall(os.getpid().to_bytes(8, "big"))
            link.close()
            return about, files
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def _become(about: dict[str, Any], files: Sequence[int]) -> None:
    """Give this process the files, environment and folder that were asked for."""
    moved = [os.dup2(file, 512 + place) for place, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(moved, about["numbers"], strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(about["environment"])
    os.chdir(about["cwd"])
    if about.get("leads"):
        os.setsid()


def _run(words: Sequence[str]) -> None:
    """Run a program as ``python WORDS`` would, and end, without taking all that was imported to pieces."""
    option, program, *rest = words[min(words.index(each) for each in ("-c", "-m") if each in words) :]
    sys.argv[:], code = [option, *rest], 0
    try:
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else ended.code is not None
        if ended.code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # It is full, or closed.
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    gc.disable()
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    asked = _fork_on_request(socket.socket(fileno=int(sys.argv[1])))
    if asked is None:
        os._exit(0)
    _become(*asked)
    _run(asked[0]["words"])
