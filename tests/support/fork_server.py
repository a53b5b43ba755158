"""Forks the trainer's processes from one that has imported torch, instead of starting a Python for each.

Importing torch and TorchRec takes longer than most tests. Inside `forked_processes()`, `subprocess.Popen` forks the
commands that `parse` accepts: a test's process has a server do it, and a forked process, such as a launcher that starts
its workers, forks itself. A forked process has its own process id, is a child of the process that started it, and gets
the command's arguments, environment, folder, session and standard streams.

It skips what Python and the libraries do at import and at exit. Tests of that run inside `real_processes()`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("trainer", "torch.distributed.run", "workloads", "injected")
SCRIPTS = ROOT / "tests" / "trainer"
_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE_BYTES = 1 << 20

Start = Callable[[dict[str, Any], Sequence[int]], int]


@dataclass(frozen=True)
class Command:
    """A Python command that can be forked: `python [-u] -m NAME ...` or `python [-u] FILE ...`."""

    name: str
    is_module: bool
    arguments: list[str]


def parse(words: Sequence[Any], scripts: Path | None = None) -> Command | None:
    """Return the command to fork, or None for one that must be started; only scripts below `scripts` are forked."""
    first, *rest = [os.fspath(word) for word in words]
    if first != sys.executable:
        return None
    if rest[:1] == ["-u"]:
        rest = rest[1:]
    if rest[:1] == ["-m"] and rest[1] in MODULES:
        return Command(rest[1], True, rest[2:])
    if rest and rest[0].endswith(".py") and (scripts is None or scripts in Path(rest[0]).parents):
        return Command(rest[0], False, rest[1:])
    return None


# --- the process that starts others -----------------------------------------------------------------------------------

_REAL = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _replace_start(start: Start, scripts: Path | None) -> None:
    """Let every `subprocess.Popen` of this process use `start` for commands that can be forked."""

    def execute_child(self: Any, *values: Any) -> None:
        given = inspect.signature(_REAL).bind(self, *values).arguments
        words = [given["args"]] if isinstance(given["args"], (str, bytes)) else list(given["args"])
        command = None if given["shell"] or given["preexec_fn"] else parse(words, scripts)
        if command is None:
            _REAL(self, *values)
            return
        order = {
            "name": command.name,
            "is_module": command.is_module,
            "arguments": command.arguments,
            "cwd": os.fspath(given["cwd"] or Path.cwd()),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "new_session": given["start_new_session"],
        }
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        streams = [own if own != -1 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        try:
            self.pid = start(order, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


class _Server:
    """The test process's end of the connection to a server, which is started at the first order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, order: dict[str, Any], streams: Sequence[int]) -> int:
        """Fork a process for the order and return its id: it is a child of this process."""
        with self._lock:
            connection = self._connection or self._connect()
            # The server's helper exits at once; the kernel then gives its child to the nearest subreaper above.
            _set_subreaper(True)
            try:
                socket.send_fds(connection, [json.dumps(order).encode()], streams)
                return int(connection.recv(64))
            finally:
                _set_subreaper(False)

    def close(self) -> None:
        """End the server; processes that it forked continue."""
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.wait()

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folders = [str(ROOT), str(ROOT / "tests" / "trainer"), str(Path(__file__).parent)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                start_new_session=True,
            )
        self._connection = ours
        return ours


def _set_subreaper(value: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@contextmanager
def forked_processes() -> Iterator[None]:
    """Fork the commands that `parse` knows."""
    server = _Server()
    _replace_start(server.start, SCRIPTS)
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _REAL  # type: ignore[attr-defined]
        server.close()


@contextmanager
def real_processes() -> Iterator[None]:
    """Start a Python for every command, also inside `forked_processes()`."""
    current = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = _REAL  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = current  # type: ignore[attr-defined]


# --- the server -------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    """Fork a process for each order, until the other end closes."""
    while True:
        data, streams, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 3)
        if not data:
            return
        receiving, sending = os.pipe()
        helper = os.fork()
        if helper == 0:
            own = os.getpid()
            child = os.fork()
            if child == 0:
                while os.getppid() == own:  # not yet given to the process that asked
                    time.sleep(0.001)
                _become(json.loads(data), streams)
            os.write(sending, str(child).encode())
            os._exit(0)
        os.waitpid(helper, 0)
        connection.send(os.read(receiving, 64))
        for descriptor in (receiving, sending, *streams):
            os.close(descriptor)


def import_everything() -> None:
    """Import what a command of the trainer or torchrun needs."""
    importlib.import_module("torch.distributed.run")
    for module in pkgutil.walk_packages(importlib.import_module("trainer").__path__, "trainer."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    # For events that are dropped it searches all imported modules for the source of each frame. With as many modules as
    # here that takes seconds, and a rendezvous removes a node that is silent for so long.
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name  # type: ignore[attr-defined]


# --- a forked process -------------------------------------------------------------------------------------------------

_KEPT: list[Any] = []


def _fork(order: dict[str, Any], streams: Sequence[int]) -> int:
    """Fork this process, which was itself forked, for another order."""
    pid = os.fork()
    if pid == 0:
        _become(order, streams)
    return pid


def _become(order: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Run an order in this process, which was just forked, as a new Python would."""
    try:
        gc.freeze()  # a file or socket of the other process must never be closed here: its number has another meaning
        _reset_signals()
        if order["new_session"]:
            os.setsid()
        for number, copy in enumerate([os.dup(stream) for stream in streams]):
            os.dup2(copy, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        _KEPT.append((sys.stdin, sys.stdout, sys.stderr))  # else what they hold of the other process is written twice
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        atexit._clear()
        _replace_start(_fork, None)
        os.execv = _execute  # type: ignore[assignment]
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    _run(Command(order["name"], order["is_module"], order["arguments"]))


def _reset_signals() -> None:
    """Handle signals as after exec: none is caught, and what is ignored stays ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)) or signal.getsignal(number) is None:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _execute(path: str, words: Sequence[str]) -> NoReturn:
    """Replace this process's program, in place of `os.execv`."""
    command = parse(words)
    if command is None:
        os.execve(path, words, os.environ)
    _run(command)


def _run(command: Command) -> NoReturn:
    """Run a command to its end and exit with its code."""
    code = 1
    try:
        first = str(Path.cwd()) if command.is_module else str(Path(command.name).resolve().parent)
        given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        installed = [folder for folder in sys.path if folder.startswith((sys.prefix, sys.base_prefix))]
        sys.path[:] = [first, *given, *installed]
        importlib.invalidate_caches()
        sys.argv = [command.name, *command.arguments]
        if command.is_module:
            runpy.run_module(command.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command.name, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    import_everything()
    serve(socket.socket(fileno=int(sys.argv[1])))
