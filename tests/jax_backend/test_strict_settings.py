"""Everything works under JAX's strict settings, as programs written by hand do. The programs: `strict_programs`."""

import numpy as np
import pytest

from tests.jax_backend.worker import in_jax

SETTINGS = {
    "no rank promotion": lambda jax: jax.numpy_rank_promotion("raise"),
    "no dtype promotion": lambda jax: jax.numpy_dtype_promotion("strict"),
    "leaks are checked": lambda jax: jax.checking_leaks(),
    "NaNs are errors": lambda jax: jax.debug_nans(True),
    "64 bits": lambda jax: jax.enable_x64(True),
    "no implicit transfers": lambda jax: jax.transfer_guard("disallow"),
}


def check_programs(setting):
    """Compare what every program gives under a setting with what it gives without."""
    import jax

    from tests.jax_backend import strict_programs

    strict_programs.register_states()
    usual = strict_programs.outcomes()
    with SETTINGS[setting](jax):
        strict = strict_programs.outcomes()
    for name, wanted in usual.items():
        assert not isinstance(wanted, str), f"{name}: {wanted}"
        assert not isinstance(strict[name], str), f"{setting}: {name}: {strict[name]}"
        for one, other in zip(wanted, strict[name], strict=setting != "leaks are checked"):
            np.testing.assert_allclose(
                *(np.asarray(x, np.complex128) for x in (one, other)), rtol=1e-5, atol=1e-5, err_msg=name
            )


@pytest.mark.parametrize("setting", SETTINGS)
@in_jax(4)
def test_every_public_function_gives_the_same_under_a_strict_setting(setting):
    """The usual results are compared with numpy where each function has its tests."""
    check_programs(setting)
