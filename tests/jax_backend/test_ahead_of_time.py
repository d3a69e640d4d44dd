"""`dm.aot`: what was lowered in one state refuses to run in another."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ScopeError, StaleStateError
from tests.jax_backend.worker import in_jax, two_grids, two_meshes

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
    with pytest.raises(ScopeError, match=r"traced in 'b' \(State 'b'\) and is called in 'a' \(State 'a'\)"):
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


@in_jax()
def test_what_was_traced_is_lowered_in_its_own_state_only():
    import jax

    two_meshes()
    checked = dm.aot(jax.jit(lambda x: x * dm.get_parallel_state().size("sp")))
    with dm.use_parallel_state("b"):
        traced = checked.trace(X)
        lowered = traced.lower()
    assert "mul" in str(traced.jaxpr)
    assert traced.out_info.shape == (8,)
    with pytest.raises(ScopeError, match=r"traced in 'b' \(State 'b'\) and is lowered in 'a' \(State 'a'\)"):
        traced.lower()
    compiled = lowered.compile()
    with pytest.raises(ScopeError, match="is called in 'a'"):
        compiled(X)
    with dm.use_parallel_state("b"):
        np.testing.assert_array_equal(np.asarray(compiled(X)), 4 * X)
        with pytest.raises(ArgumentError, match="a Lowered function is not compiled yet"):
            lowered(X)


@in_jax()
def test_a_function_whose_names_mean_something_else_now_is_refused():
    """The old meaning again is fine."""
    import jax

    two_grids()

    @dm.use_parallel_state("talker")
    def size(x):
        return x * dm.get_parallel_state().size("dp")

    compiled = dm.aot(jax.jit(size)).lower(X).compile()
    np.testing.assert_array_equal(np.asarray(compiled(X)), 8 * X)
    dm.clear_parallel_state("talker")
    with pytest.raises(ScopeError, match=r"names that traced code looked up mean other states, or none: 'talker'"):
        compiled(X)
    dm.init_parallel_state(dp_size=8, name="talker")
    np.testing.assert_array_equal(np.asarray(compiled(X)), 8 * X)
