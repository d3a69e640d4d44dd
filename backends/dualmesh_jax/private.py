"""All that depends on the version of JAX: names that are not public, names that came or went, texts of its errors.

Each is guarded and says what happens where it is missing. Nothing else in the backend asks which JAX this is.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, get_opaque_trace_state
from jax.sharding import Mesh, get_mesh

_is_initialized: Callable[[], bool] | None
try:
    # No public function tells whether JAX has started its backend without starting it. Retired by one that does
    # (https://github.com/jax-ml/jax/blob/main/jax/_src/xla_bridge.py).
    from jax._src.xla_bridge import backends_are_initialized as _is_initialized
except ImportError:  # another JAX: a world that the user started is adopted when dualmesh is asked to start one
    _is_initialized = None

_runtime: Any
try:
    # The store in which the processes met has no public face. Retired by one
    # (https://github.com/jax-ml/jax/blob/main/jax/_src/distributed.py).
    from jax._src.distributed import global_state as _runtime
except ImportError:  # another JAX: processes do not compare states first, and exchange no Python objects
    _runtime = None

# Inside tracing no public function tells which mesh jit was called under; this one sets tracing aside for a while.
# Retired by one that does (https://github.com/jax-ml/jax/blob/main/jax/core.py).
_outside_tracing: Any = getattr(jax.core, "eval_context", None)

# JAX has one such state for all threads.
_untransformed: object = None
if _outside_tracing is not None:
    with _outside_tracing():
        _untransformed = get_opaque_trace_state()

_metadata: Callable[[], dict[str, Any] | None] | None
try:
    # The public `set_xla_metadata` has no reader. Seen in jax 0.10.2; retired by one
    # (https://github.com/jax-ml/jax/blob/main/jax/_src/xla_metadata_lib.py).
    from jax._src.xla_metadata_lib import current_xla_metadata as _metadata
except ImportError:  # another JAX: gradient rules run in the state that is ambient when they are traced
    _metadata = None
_held: Any = None
_with_metadata: Callable[[Any, dict[str, str]], Any] | None
try:
    # `set_xla_metadata` sets it for a thread only, and for a block. Seen in jax 0.10.2; retired by a public way to set
    # it for all threads (https://github.com/jax-ml/jax/blob/main/jax/_src/xla_metadata.py).
    from jax._src.config import xla_metadata_context_manager as _held
    from jax._src.xla_metadata_lib import update_metadata as _with_metadata
except ImportError:  # another JAX: rules of code traced outside any scope run in what is ambient
    _with_metadata = None

_CALLBACKS = ("jax._src.callback", "jax._src.debugging")
_STORE_METHODS = (
    *("key_value_increment", "key_value_set", "key_value_try_get", "blocking_key_value_get", "key_value_delete"),
    *("key_value_set_bytes", "key_value_dir_get", "key_value_dir_get_bytes", "wait_at_barrier"),
)


def backend_is_initialized() -> bool:
    """Tell whether JAX has started its backend; False where it cannot be told. *Local*; starts nothing."""
    return _is_initialized is not None and bool(_is_initialized())


def may_have_started() -> bool:
    """Tell whether JAX has started its backend; True where it cannot be told. *Local*; starts nothing."""
    return _is_initialized is None or bool(_is_initialized())


def store_client() -> Any | None:
    """Return the client of the store in which JAX's processes met, or None where there is none. *Local.*"""
    client = getattr(_runtime, "client", None)
    return client if all(hasattr(client, name) for name in _STORE_METHODS) else None


def mesh_outside_tracing() -> Mesh | None:
    """Return the mesh that `jax.set_mesh` set, empty where none did; None where it cannot be told. *Local.*

    It cannot be told inside `shard_map` and `vmap` with `axis_name`, and on a JAX that has no `jax.core.eval_context`.
    """
    if _outside_tracing is None:
        return None
    try:
        with _outside_tracing():
            return get_mesh()
    except ValueError:  # JAX's answer inside tracing
        return None


def is_transforming() -> bool:
    """Tell whether a transformation is at work here, an eager gradient or vmap included; True where it cannot be told.

    *Local.*
    """
    return bool(get_opaque_trace_state() != _untransformed)


def xla_metadata(key: str) -> str | None:
    """Return what `set_xla_metadata` holds under a key here, None for nothing or where it cannot be told. *Local.*"""
    held = None if _metadata is None else _metadata()
    return None if held is None else held.get(key)


def set_xla_metadata_everywhere(key: str, value: str | None) -> None:
    """Hold a value under a key where nothing else is held, in every thread; None: nothing any more. *Local.*"""
    if _with_metadata is not None and hasattr(_held, "set_global"):
        _held.set_global(None if value is None else _with_metadata(None, {key: value}))


def may_be_in_callback() -> bool:
    """Tell whether a JAX callback may have called this code, asked cheaply: `runs_callback` looks. *Local.*

    JAX runs them with a default device, in its own threads and in the one that waits.
    """
    return getattr(jax.config, "jax_default_device", None) is not None


def is_ready(x: jax.Array) -> bool:
    """Tell whether an array can be read without waiting, or its computation failed; True where it cannot be told.

    JAX's arrays have this method, but `jax.Array` does not promise it. Seen in 0.10.2; retired by a public one
    (https://github.com/jax-ml/jax/blob/main/jaxlib/py_array.cc).
    """
    asked: Callable[[], bool] | None = getattr(x, "is_ready", None)
    return asked is None or bool(asked())


def primal_of(x: Any) -> Any:
    """Return what an eager gradient computes with, where `x` is its tracer; else `x`; a tracer where it cannot be told.

    No public function gives it. Seen in 0.10.2 (https://github.com/jax-ml/jax/blob/main/jax/_src/interpreters/ad.py).
    """
    while isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):
        x = x.primal
    return x


def device_put(x: Any, sharding: Any, src: Any = None) -> Any:
    """Lay an array out anew, as `jax.device_put` does, also under a guard against implicit transfers.

    Being asked for by name, it is no implicit one; but jax 0.12 moves some arrays through the host, and refuses its own
    reading of them. Seen in 0.12.0.1 on CPU, not in 0.11; retired by a release that does not.
    """
    if getattr(jax.config, "jax_transfer_guard_device_to_host", None) != "disallow":
        return jax.device_put(x, sharding, src=src)
    with jax.transfer_guard_device_to_host("allow"):
        return jax.device_put(x, sharding, src=src)


_CLASSES: tuple[Any, Any] = (ClosedJaxpr, Jaxpr)


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return a program that takes its constants as arguments, and these. *Pure.*

    `ClosedJaxpr(program, constants)` puts them together again. In jax 0.10 a program with constants has a class of its
    own, which holds the other; from 0.11 on there is one class, whose `jaxpr` is itself.
    """
    constants, (closed, plain) = getattr(program, "consts", ()), _CLASSES
    if closed is not plain:
        return getattr(program, "jaxpr", program), constants
    return (ClosedJaxpr(program, []) if constants else program), constants


def runs_callback() -> bool:
    """Tell whether a JAX callback called this code, by the modules on the stack; False where they are others. *Local.*

    Seen in jax 0.10.2; retired by a public answer (https://github.com/jax-ml/jax/blob/main/jax/_src/callback.py).
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  no public way to look up the stack costs as little
    while frame is not None:
        if frame.f_globals.get("__name__") in _CALLBACKS:
            return True
        frame = frame.f_back
    return False


# -- texts of JAX's errors ---------------------------------------------------------------------------------------------
# JAX has one class for all that its runtime reports; which of them it is, only the text says. Seen in jax 0.10.2 to
# 0.12. Other texts are JAX's own error, as it is.
_CARRIERS = ("gloo", "nccl")
_LOST = (*_CARRIERS, "deadline_exceeded", "unavailable", "connection", "coordination")


def has_status(error: BaseException, status: str) -> bool:
    """Tell whether JAX's runtime reports a status: "NOT_FOUND", "ALREADY_EXISTS", "DEADLINE_EXCEEDED"."""
    return str(error).startswith(status)


def is_timeout(error: BaseException) -> bool:
    """Tell whether an exchange failed because others did not come in time."""
    return "deadline_exceeded" in str(error).lower()


def is_lost_exchange(error: BaseException) -> bool:
    """Tell whether processes could not exchange something, rather than a program being wrong."""
    signs = _LOST if isinstance(error, jax.errors.JaxRuntimeError) else _CARRIERS
    return any(sign in str(error).lower() for sign in signs)


def misses_mesh(said: str) -> bool:
    """Tell whether an error says that JAX needs a mesh here and has none."""
    return "mesh" in said and "empty" in said
