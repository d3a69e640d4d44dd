"""How far a training run is from the oracle: the largest relative difference of each of its arrays."""

import numpy as np

LIMITS = {"float64": 1e-10, "float32": 2e-5}


def difference(found, wanted):
    """Return max |found - wanted| / max |wanted|, float64."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if found.shape != wanted.shape:
        return np.inf
    return float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))


def differences(losses, gradients, parameters, expected, cut=lambda name, whole: whole):
    """Return {"losses", "gradient of NAME", "NAME" afterwards: difference}; `cut` takes the part that a run holds."""
    found = {"losses": difference(losses, expected["losses"])}
    for what, own in (("gradient of {}", gradients), ("{}", parameters)):
        kind = "gradients" if "gradient" in what else "parameters"
        if own.keys() != expected[kind].keys():
            raise KeyError(f"{kind}: found {sorted(own)}")
        found |= {what.format(name): difference(value, cut(name, expected[kind][name])) for name, value in own.items()}
    return found


def worst(found):
    """Return (name, difference) of the largest one; NaN counts as largest."""
    name = max(found, key=lambda name: np.inf if np.isnan(found[name]) else found[name])
    return name, found[name]
