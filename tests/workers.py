"""Worker processes that start once and are reused: one per torch rank, one for JAX.

Functions travel by cloudpickle. A call that does not end in time kills the pool and says which workers were missing.
"""

import atexit
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

DEFAULT_TIMEOUT_S = 120.0


class WorkerError(AssertionError):
    """A worker raised, died or did not answer; `errors` maps worker to its exception (None: no answer)."""

    def __init__(self, message: str, errors: dict[int, BaseException | None]) -> None:
        super().__init__(message)
        self.errors = errors


class Pool:
    """Worker processes with an environment of their own."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._workers: list[tuple[Any, Connection]] = []
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any], args: Sequence[tuple[Any, ...]], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """Call `fn(*args[i])` on worker i, for all i at once, and return the results in order."""
        outcomes = self.outcomes(fn, args, timeout_s=timeout_s)
        errors = {i: error for i, (kind, error, _) in outcomes.items() if kind != "ok"}
        if errors:
            texts = [f"worker {i}: {outcomes[i][2]}" for i in errors]
            raise WorkerError("\n".join(texts), errors)
        return [outcomes[i][1] for i in range(len(args))]

    def outcomes(
        self, fn: Callable[..., Any], args: Sequence[tuple[Any, ...]], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> dict[int, tuple[str, Any, str]]:
        """Call as `run` does; return {i: ("ok", result, "") | ("error", exception, text) | ("missing", None, text)}."""
        while len(self._workers) < len(args):
            self._workers.append(self._started())
        for (_, pipe), own in zip(self._workers, args, strict=False):
            pipe.send_bytes(cloudpickle.dumps((fn, own)))
        waiting = {pipe: i for i, (_, pipe) in enumerate(self._workers[: len(args)])}
        outcomes: dict[int, tuple[str, Any, str]] = {}
        while waiting:
            ready = wait(list(waiting), timeout_s)
            if not ready:
                break
            for pipe in ready:
                i = waiting.pop(pipe)
                try:
                    outcomes[i] = cloudpickle.loads(pipe.recv_bytes())
                except EOFError:
                    outcomes[i] = ("missing", None, f"died with exit code {self._exit_code(i)}")
        for i in waiting.values():
            outcomes[i] = ("missing", None, f"no answer within {timeout_s} s")
        if any(kind == "missing" for kind, _, _ in outcomes.values()):
            self.close()
        return outcomes

    def close(self) -> None:
        """Kill all workers; the next call starts fresh ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []

    def _exit_code(self, i: int) -> int | None:
        self._workers[i][0].join(5)
        return self._workers[i][0].exitcode

    def _started(self) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        saved = {key: os.environ.get(key) for key in self._env}
        os.environ.update(self._env)
        try:
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
        finally:
            for key, value in saved.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value
        there.close()
        return process, here


def _serve(pipe: Connection) -> None:
    while True:
        try:
            fn, args = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("ok", fn(*args), "")
        except BaseException as error:
            answer = ("error", _travelling(error), traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(answer))


def _travelling(error: BaseException) -> BaseException:
    try:
        return cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
