"""Worker processes that start once and are reused, each with an environment of its own.

How functions travel is in `packing`; what world a function then runs in, in `places`. A script that starts workers does
so under `if __name__ == "__main__":`, because each worker imports the script again.
"""

import atexit
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from dualmesh._support.optional_imports import cloudpickle
from dualmesh.errors import WorkerError
from dualmesh.testing.packing import pack

DEFAULT_TIMEOUT_S = 120.0


class Outcome(NamedTuple):
    """How a call ended: kind is ok, error (value: the exception) or missing (no answer)."""

    kind: str
    value: Any
    text: str


class Pool:
    """Worker processes that start when first needed and serve until the pool is closed or this process ends.

    A worker in which something called `retire` is replaced before its next call.
    A call that does not end in time kills the pool and says which workers were missing; the next one starts fresh.

    Args:
        env: Environment variables of the workers, beside those of this process.
        path: Folders that workers import from before all others.

    >>> pool = Pool({})
    >>> pool.run(pow, [(2, 3), (3, 2)])
    [8, 9]
    >>> pool.close()
    """

    def __init__(self, env: Mapping[str, str], path: Sequence[str] = ()) -> None:
        self._env = dict(env)
        self._path = tuple(path)
        self._workers: list[tuple[Any, Connection]] = []
        self._worn: set[int] = set()
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any], args: Sequence[tuple[Any, ...]], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """Call `fn(*args[i])` on worker i, for all i at once, and return the results in order.

        Raises:
            WorkerError: Some did not return; the message has the traceback of each.
        """
        outcomes = self.outcomes(fn, args, timeout_s=timeout_s)
        errors = {i: outcome.value for i, outcome in outcomes.items() if outcome.kind != "ok"}
        if errors:
            raise WorkerError("\n".join(f"worker {i}: {outcomes[i].text}" for i in errors), errors=errors)
        return [outcomes[i].value for i in range(len(args))]

    def outcomes(
        self, fn: Callable[..., Any], args: Sequence[tuple[Any, ...]], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> dict[int, Outcome]:
        """Call as `run` does; return how each call ended, by worker."""
        for i in self._worn:
            _end(*self._workers[i])
            self._workers[i] = self._started()
        self._worn.clear()
        while len(self._workers) < len(args):
            self._workers.append(self._started())
        for (_, pipe), own in zip(self._workers, args, strict=False):
            pipe.send_bytes(pack((fn, own)))
        waiting: dict[Any, int] = {pipe: i for i, (_, pipe) in enumerate(self._workers[: len(args)])}
        outcomes: dict[int, Outcome] = {}
        while waiting:
            ready = wait(list(waiting), timeout_s)
            if not ready:
                break
            for i in [waiting.pop(pipe) for pipe in ready]:
                outcomes[i] = self._answer(i)
        for i in waiting.values():
            outcomes[i] = Outcome("missing", None, f"no answer within {timeout_s} s")
        if any(outcome.kind == "missing" for outcome in outcomes.values()):
            self.close()
        return outcomes

    def close(self) -> None:
        """Kill all workers; the next call starts fresh ones."""
        for process, pipe in self._workers:
            _end(process, pipe)
        self._workers = []
        self._worn.clear()

    def _answer(self, i: int) -> Outcome:
        process, pipe = self._workers[i]
        try:
            answer, is_worn = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            process.join(5)
            return Outcome("missing", None, f"died with exit code {process.exitcode}")
        if is_worn:
            self._worn.add(i)
        return Outcome(*answer)

    def _started(self) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        with _environment(self._env):
            process = context.Process(target=_serve, args=(there, self._path), daemon=True)
            process.start()
        there.close()
        return process, here


class _Worker:
    """What this process knows of itself as a worker."""

    is_worn = False


def retire() -> None:
    """Have the worker that calls this replaced before its next call. *Local.*"""
    _Worker.is_worn = True


def _end(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.join()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that start in the block."""
    saved = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in saved.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _serve(pipe: Connection, path: Sequence[str]) -> None:
    sys.path[:0] = [folder for folder in path if folder not in sys.path]
    while True:
        try:
            sent = pipe.recv_bytes()
        except EOFError:
            return
        try:
            fn, args = cloudpickle.loads(sent)
            answer = ("ok", fn(*args), "")
        except BaseException as error:
            answer = ("error", _travelling(error), traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps((answer, _Worker.is_worn)))


def _travelling(error: BaseException) -> BaseException:
    """Return an exception that arrives: the same where it can be pickled."""
    try:
        travelled: BaseException = cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return travelled
