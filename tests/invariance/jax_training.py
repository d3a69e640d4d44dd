"""The model of `model` trained with JAX over any split: `dm.shard_map` under jit, optax's AdamW."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dualmesh as dm
from tests.invariance import model
from tests.invariance.comparison import differences
from tests.invariance.reference import BETAS, DECAY, EPSILON, LEARNING_RATE, STEPS

# Compiling is most of the time here, and these programs run three times each.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


@cache
def quickly():
    """Return those of the options `QUICK` that this version of the compiler has."""
    known = {}
    for option, value in QUICK.items():
        try:
            jax.jit(lambda x: x, compiler_options={option: value}).lower(0.0).compile()
        except jax.errors.JaxRuntimeError:
            continue
        known[option] = value
    return known


def trained_by(form):
    """Return the function that trains in a form: there is one."""
    return {"jax": trained}[form]


def trained(accumulation, dtype, expected):
    """Train global arrays in jit and compare."""
    parameters = {
        name: dm.distribute(value, model.STORED[name]) for name, value in model.initial_parameters(dtype).items()
    }
    batches = model.MICRO_BATCHES
    specs = (model.STORED, model.TOKENS, model.TOKENS, dm.P())
    loss_of = dm.shard_map(model.global_loss, in_specs=specs, out_specs=dm.P())
    count = dm.shard_map(model.token_count, in_specs=(batches,), out_specs=dm.P())
    optimizer = optax.adamw(LEARNING_RATE, *BETAS, EPSILON, weight_decay=DECAY)

    @partial(jax.jit, compiler_options=quickly())
    def update(parameters, optimizer_state, tokens, targets):
        total = count(targets)

        def whole(parameters):
            def add(so_far, micro):
                return so_far + loss_of(parameters, *micro, total), None

            return jax.lax.scan(add, jnp.zeros((), dtype), (tokens, targets))[0]

        loss, gradients = jax.value_and_grad(whole)(parameters)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return optax.apply_updates(parameters, updates), optimizer_state, loss, gradients

    optimizer_state = jax.jit(optimizer.init)(parameters)
    losses, first = [], None
    for step in range(STEPS):
        micro_batches = [np.stack(np.split(part, accumulation)) for part in model.batch(step)]
        micro_batches = [dm.distribute(part, batches) for part in micro_batches]
        parameters, optimizer_state, loss, gradients = update(parameters, optimizer_state, *micro_batches)
        losses.append(float(loss))
        first = gradients if first is None else first
    gradients, parameters = ({name: dm.to_numpy(x) for name, x in tree.items()} for tree in (first, parameters))
    return differences(losses, gradients, parameters, expected)
