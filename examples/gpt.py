"""What the two GPTs of `cross_framework_test` share: sizes, first parameters, batches, and whose parameter is whose."""

import numpy as np

import dualmesh as dm
from dualmesh.testing import ParamMap, transforms

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH, LAYERS, STEPS = 16, 16, 4, 32, 8, 2, 3
TOKENS = dm.P("dp", "sp")
OPTIMIZER = {"lr": 3e-3, "weight_decay": 0.01}

LAYER = {
    "norm1.weight": (WIDTH,),
    "norm1.bias": (WIDTH,),
    **{f"{name}.weight": (WIDTH, WIDTH) for name in ("query", "key", "value", "out")},
    "norm2.weight": (WIDTH,),
    "norm2.bias": (WIDTH,),
    "up.weight": (HIDDEN, WIDTH),
    "up.bias": (HIDDEN,),
    "down.weight": (WIDTH, HIDDEN),
    "down.bias": (WIDTH,),
}
SHAPES = {
    "embed.weight": (VOCABULARY, WIDTH),
    "position.weight": (LENGTH, WIDTH),
    **{f"layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in LAYER.items()},
    "norm.weight": (WIDTH,),
    "norm.bias": (WIDTH,),
    "head.weight": (VOCABULARY, WIDTH),
}

PARAM_MAP = ParamMap(
    [
        ("embed.weight", "embed.embedding"),
        ("position.weight", "position.embedding"),
        ("layers.*.norm*.weight", "blocks.*.norm*.scale"),
        ("layers.*.norm*.bias", "blocks.*.norm*.bias"),
        (
            ("layers.*.query.weight", "layers.*.key.weight", "layers.*.value.weight"),
            "blocks.*.qkv.kernel",
            transforms.transpose().then(transforms.fuse(1, 3)),
        ),
        *[
            (f"layers.*.{name}.weight", f"blocks.*.{name}.kernel", transforms.transpose())
            for name in ("out", "up", "down")
        ],
        *[(f"layers.*.{name}.bias", f"blocks.*.{name}.bias") for name in ("up", "down")],
        ("norm.weight", "norm.scale"),
        ("norm.bias", "norm.bias"),
        ("head.weight", "head.kernel", transforms.transpose()),
    ]
)


def first_parameters() -> dict[str, np.ndarray]:
    """Draw the parameters by the names of the torch program, float64."""
    draw = np.random.default_rng(0)
    return {name: draw.normal(0.1 if name.endswith("weight") else 0.0, 0.3, shape) for name, shape in SHAPES.items()}


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw (tokens, targets) of every step, (8, LENGTH) each."""
    draw = np.random.default_rng(1)
    return [tuple(draw.integers(0, VOCABULARY, (2, 8, LENGTH))) for _ in range(STEPS)]
