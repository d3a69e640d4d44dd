"""`dm.aot`: what was lowered in one state refuses to run in another."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ScopeError, StaleStateError
from tests.jax_backend.worker import in_jax, two_meshes

X = np.arange(8.0)


@in_jax()
def test_a_compiled_function_checks_the_scope_at_each_call():
    import jax

    two_meshes()
    step = jax.jit(lambda x: x * dm.get_parallel_state().size("sp"))
    checked = dm.aot(step)
    with dm.use_parallel_state("b"):
        bare = step.lower(X).compile()
        compiled = checked.lower(X).compile()
        np.testing.assert_array_equal(np.asarray(compiled(X)), 4 * X)
    np.testing.assert_array_equal(np.asarray(bare(X)), 4 * X)  # what it is for: the answer of another state
    with pytest.raises(ScopeError, match=r"lowered in 'b' \(State 'b'\) and is called in 'a' \(State 'a'\)"):
        compiled(X)
    np.testing.assert_array_equal(np.asarray(checked(X)), 2 * X)
    assert "fusion" in compiled.as_text() or "multiply" in compiled.as_text()
    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "sp": 4}), name="same as b")
    with dm.use_parallel_state("same as b"):
        np.testing.assert_array_equal(np.asarray(compiled(X)), 4 * X)


@in_jax()
def test_a_cleared_state_and_what_is_not_jitted_are_refused():
    import jax

    state, _ = two_meshes()
    compiled = dm.aot(jax.jit(lambda x: x + 1)).lower(X).compile()
    dm.clear_parallel_state()
    with dm.use_parallel_state(state), pytest.raises(StaleStateError, match="aot: State 'a' was cleared"):
        compiled(X)
    with pytest.raises(ArgumentError, match=r"cannot be lowered.*dm\.aot\(jax\.jit\(fn\)\)"):
        dm.aot(lambda x: x)
