"""JAX names that are not public; each is guarded and says what happens where it is missing."""

from collections.abc import Callable

_is_initialized: Callable[[], bool] | None
try:
    # No public function tells whether JAX has started its backend without starting it. Retired by one that does
    # (https://github.com/jax-ml/jax/blob/main/jax/_src/xla_bridge.py).
    from jax._src.xla_bridge import backends_are_initialized as _is_initialized
except ImportError:  # another JAX: a world that the user started is adopted when dualmesh is asked to start one
    _is_initialized = None


def backend_is_initialized() -> bool:
    """Tell whether JAX has started its backend; False where it cannot be told. *Local*; starts nothing."""
    return _is_initialized is not None and bool(_is_initialized())
