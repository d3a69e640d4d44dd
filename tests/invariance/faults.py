"""What can be wrong with a collective's gradient or with a factor, done on purpose: values stay, gradients do not."""

from contextlib import contextmanager

import dualmesh as dm
from dualmesh.sequence import ring


@contextmanager
def broken(name):
    """Break one thing while the block runs; None breaks nothing."""
    if name is None:
        yield
        return
    place, attribute, make = FAULTS[name]()
    right = getattr(place, attribute)
    setattr(place, attribute, make(right))
    try:
        yield
    finally:
        setattr(place, attribute, right)


def wrong_factor(verb):
    """Make the gradient of a collective half as large again."""

    def make(right):
        def wrong(self, x, axis, **settings):
            y = right(self, x, axis, **settings)
            return y + 0.5 * (y - self.stop_gradient(y)) if "float" in str(x.dtype) else y

        return wrong

    return lambda: (type(dm.get_parallel_state().collectives), verb, make)


def wrong_way():
    """Send the gradient of a permutation on instead of back."""

    def make(right):
        def wrong(self, x, axis, *, pairs):
            y = self.stop_gradient(right(self, x, axis, pairs=pairs))
            if "float" not in str(x.dtype):
                return y
            back = right(self, x, axis, pairs=tuple((dst, src) for src, dst in pairs))
            return y + (back - self.stop_gradient(back))

        return wrong

    return type(dm.get_parallel_state().collectives), "permute", make


def unsummed_entrance():
    """Let the gradient of `enter` pass unsummed."""
    return type(dm.get_parallel_state().collectives), "enter", lambda right: lambda self, x, axis: x


def stale_maximum():
    """Merge two blocks of ring attention without rescaling the first."""

    def make(right):
        def wrong(xp, first, second):
            numerator, denominator, highest = right(xp, first, second)
            old = xp.exp(first[2] - highest)
            return numerator + first[0] * (1 - old), denominator + first[1] * (1 - old), highest

        return wrong

    return ring, "_merged", make


def own_total():
    """Divide by the tokens of the micro-batch instead of the step's."""
    return dm, "token_mean", lambda right: lambda loss_sum, count, total=None: right(loss_sum, count)


def averaged_by_wrappers():
    """Leave FSDP2 its division by the number of ranks."""
    return dm, "sum_gradients", lambda right: lambda model: None


def averaged_by_hand():
    """Average plain gradients instead of summing them."""

    def make(right):
        def wrong(params, axis="dp_sp"):
            right(params, axis)
            for parameter in params:
                parameter.grad /= dm.ops.axis_size(axis)

        return wrong

    return dm, "sync_gradients", make


FAULTS = {
    **{f"{verb}: wrong factor": wrong_factor(verb) for verb in ("all_gather", "all_to_all", "ragged_all_to_all")},
    **{f"{verb}: wrong factor": wrong_factor(verb) for verb in ("all_reduce", "leave", "take_block", "permute")},
    "permute: wrong way": wrong_way,
    "enter: no sum": unsummed_entrance,
    "ring: stale maximum": stale_maximum,
    "token_mean: own total": own_total,
    "sum_gradients: left out": averaged_by_wrappers,
    "sync_gradients: mean": averaged_by_hand,
}
