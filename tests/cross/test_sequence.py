"""The seed's sequence functions: torch, JAX and sim against numpy, values and the gradients its callers count on."""

import numpy as np

import dualmesh as dm
from dualmesh.testing import assert_same, compare_places
from tests.worlds import wide_worlds, worlds

SIZE, LENGTHS = 4, (3, 1, 0, 2)


def seed_functions():
    """Return, by name, the functions of this rank's block, for the ambient state."""
    state = dm.get_parallel_state()
    seq = dm.sequence
    group = state.group("sp") if state.backend == "torch" else "sp"

    def own(x):
        index = dm.ops.axis_index("sp")
        return x[: LENGTHS[index]] if isinstance(index, int) else x

    def whole(x):
        return seq.pad_tensor(x, 0, max(LENGTHS) - x.shape[0])

    return {
        "slice": lambda x: seq.slice_input_tensor(x, 0, group=group),
        "slice padded": lambda x: seq.slice_input_tensor(x, 1, padding_value=7),
        "slice scaled": lambda x: seq.slice_input_tensor_scale_grad(x, 0),
        "slice unscaled": lambda x: seq.slice_input_tensor_scale_grad(x, 0, scale_grad=False, group=("ulysses", "cp")),
        "gather scaled": lambda x: seq.gather_outputs(x, 0, scale_grad=True),
        "gather": lambda x: seq.gather_outputs(x, -1),
        "gather unpadded": lambda x: seq.gather_outputs(x, 0, 0, 6),
        "pad and slice": lambda x: seq.sp_pad_and_slice(x, -1, 7, 2),
        "qkv": lambda x: seq.gather_seq_scatter_heads_qkv(x, 0),
        "qkv split": lambda x: seq.gather_seq_scatter_heads_qkv(x, 0, unpadded_dim_size=7, restore_shape=False),
        "pad, unpad": lambda x: seq.unpad_tensor(seq.pad_tensor(x, 1, 3, 2.0), 1, 2),
        "packed": lambda x: seq.sp_gather_seqs(own(x), 0, lengths=LENGTHS)[0],
        "packed, taken": lambda x: whole(
            seq.sp_take_own_seq(
                *seq.sp_gather_seqs(own(x), 0, lengths=LENGTHS)[:1], 0, LENGTHS, dm.ops.axis_index("sp")
            )
        ),
    }


def expected(name, x, w):
    """Return (values, gradients for weights of the values) in numpy, per rank."""
    n = SIZE
    ranks = range(n)

    def placed(block, i, dim, like):
        out = np.zeros_like(like)
        cut = [slice(None)] * out.ndim
        width = block.shape[dim]
        stop = min((i + 1) * width, out.shape[dim])
        cut[dim] = slice(i * width, stop)
        own = [slice(None)] * out.ndim
        own[dim] = slice(0, max(stop - i * width, 0))
        if stop > i * width:
            out[tuple(cut)] = block[tuple(own)]
        return out

    def padded(a, dim, to, value):
        width = [(0, 0)] * a.ndim
        width[dim] = (0, -a.shape[dim] % to)
        return np.pad(a, width, constant_values=value)

    if name in ("slice", "slice padded", "pad and slice"):
        dim, to, value = {"slice": (0, n, 0), "slice padded": (1, n, 7), "pad and slice": (1, 2 * n, 7)}[name]
        values = [np.split(padded(x[i], dim, to, value), n, axis=dim)[i] for i in ranks]
        return values, [placed(w[i], i, dim, x[i]) for i in ranks]
    if name.startswith("slice"):
        whole = np.concatenate(list(w)) / (n if name == "slice scaled" else 1)
        return [np.split(x[i], n)[i] for i in ranks], [whole] * n
    if name.startswith("gather"):
        dim = 1 if name == "gather" else 0
        whole, total = np.concatenate(list(x), axis=dim), w.sum(0)
        if name == "gather unpadded":
            whole, total = whole[:6], np.pad(total, [(0, len(whole) - 6), (0, 0)])
        return [whole] * n, [np.split(total, n, axis=dim)[i] * (n if name == "gather scaled" else 1) for i in ranks]
    if name.startswith("qkv"):

        def forward(blocks):
            whole = np.concatenate(list(blocks)).reshape(-1, 3, n, blocks.shape[-1] // 3 // n)
            return [whole[:, :, i] for i in ranks]

        index = np.arange(x.size).reshape(x.shape)
        values, places, kept = forward(x), forward(index), 7 if name == "qkv split" else None
        gradient = np.zeros(x.size)
        for i in ranks:
            gradient[places[i][:kept].reshape(-1)] += w[i].reshape(-1)
        values = [v[:kept] if kept else v.reshape(len(v), -1) for v in values]
        return values, list(gradient.reshape(x.shape))
    if name == "pad, unpad":
        return [np.pad(x[i], [(0, 0), (0, 1)], constant_values=2.0) for i in ranks], [w[i][:, :-1] for i in ranks]
    starts = np.cumsum((0, *LENGTHS))
    if name == "packed":
        gradient = [np.zeros_like(x[i]) for i in ranks]
        for i in ranks:
            gradient[i][: LENGTHS[i]] = w.sum(0)[starts[i] : starts[i + 1]]
        return [np.concatenate([x[i][: LENGTHS[i]] for i in ranks])] * n, gradient
    held = (np.arange(max(LENGTHS))[None, :] < np.array(LENGTHS)[:, None])[..., None]
    return list(x * held), list(w * held)


SHAPES = {  # name: (block, result)
    "slice": ((8, 3), (2, 3)),
    "slice padded": ((2, 6), (2, 2)),
    "slice scaled": ((8, 3), (2, 3)),
    "slice unscaled": ((8, 3), (2, 3)),
    "gather scaled": ((2, 3), (8, 3)),
    "gather": ((2, 3), (2, 12)),
    "gather unpadded": ((2, 3), (6, 3)),
    "pad and slice": ((2, 6), (2, 2)),
    "qkv": ((2, 24), (8, 6)),
    "qkv split": ((2, 24), (7, 3, 2)),
    "pad, unpad": ((2, 3), (2, 4)),
    "packed": ((3, 2), (6, 2)),
    "packed, taken": ((3, 2), (3, 2)),
}
EACH = dm.P("world")


def every_function(*blocks):
    functions = seed_functions().values()
    return tuple(fn(block[0])[None, ...] for fn, block in zip(functions, blocks, strict=True))


def test_values_and_gradients_are_the_seeds():
    draw = np.random.default_rng(5)
    arrays, unweighted = zip(
        *((draw.normal(size=(SIZE, *x)), np.zeros((SIZE, *y))) for x, y in SHAPES.values()), strict=True
    )
    named = list(zip(SHAPES, arrays, strict=True))
    compare_places(
        every_function,
        *(arrays, EACH, EACH, dm.parallel_spec(ulysses_size=SIZE)),
        wrt=range(len(arrays)),
        expected=tuple(np.stack(expected(name, x, w)[0]) for (name, x), w in zip(named, unweighted, strict=True)),
        pullback=lambda ws: [np.stack(expected(name, x, w)[1]) for (name, x), w in zip(named, ws, strict=True)],
        rtol=1e-13,
    )


LOSSES = [
    ([1.0, 2.0, 4.0, 8.0], [1, 2, 3, 4]),
    ([1.0, 2.0, np.nan, 8.0], [1, 2, 0, 5]),
    ([np.nan, 2.0, 4.0, 8.0], [0, 0, 0, 0]),
]


def reduced(means, counts):
    pairs = [(x[0], n[0]) for x, n in zip(means, counts, strict=True)]
    own = [dm.sequence.token_weighted_mean(x, n) for x, n in pairs]
    source = [dm.sequence.reduce_sequence_parallel_loss(x, n) for x, n in pairs]
    return tuple(one[None] for one in (*own, *source))


def test_a_reduced_loss_weighs_by_tokens_and_survives_ranks_without():
    """VeOmni's form has VeOmni's factor, the size, in its gradient; our own has none."""
    means, counts = ([np.array(one) for one in side] for side in zip(*LOSSES, strict=True))
    totals = [max(n.sum(), 1) for n in counts]
    values = [np.nansum(x * n) / total for x, n, total in zip(means, counts, totals, strict=True)]

    def pullback(weights):
        pairs = zip(weights[: len(counts)], weights[len(counts) :], counts, totals, strict=True)
        return [[(own + SIZE * source) * n / total for own, source, n, total in pairs]]

    compare_places(
        reduced,
        *([means, counts], EACH, EACH, dm.parallel_spec(ulysses_size=2, cp_size=2)),
        wrt=[0],
        expected=tuple(np.full(4, value) for value in (*values, *values)),
        pullback=pullback,
        rtol=1e-13,
    )


def counted_in_16_bits():
    import torch

    dm.init_parallel_state(ulysses_size=2)
    mean = torch.tensor(2.0 + dm.ops.axis_index("sp"), dtype=torch.float16)
    value = dm.sequence.token_weighted_mean(mean, torch.tensor(70_000))  # more than float16 has
    return value.item(), str(value.dtype)


def test_counts_are_not_rounded_to_the_dtype_of_the_loss():
    assert worlds()["torch"](counted_in_16_bits, world_size=2) == [(2.5, "torch.float16")] * 2


def exchanged_lengths():
    """Return the packed sequence of sequences whose lengths only their ranks know, and what is wrong by name."""
    import torch

    state = dm.init_parallel_state(ulysses_size=SIZE)
    index = state.index("sp")
    own = torch.arange(LENGTHS[index], dtype=torch.float64) + 10 * index
    full, lengths, place = dm.sequence.sp_gather_seqs(own, 0)
    back = dm.sequence.sp_take_own_seq(full, 0, lengths, place)
    said = []
    for call in (
        lambda: dm.sequence.slice_input_tensor(own, 0, group=torch),
        lambda: dm.sequence.sp_gather_seqs(torch.ones(9), 0, lengths=LENGTHS),
        lambda: dm.sequence.gather_outputs(torch.ones(2), 0, 0),
        lambda: dm.sequence.gather_seq_scatter_heads_qkv(torch.ones(2, 8), 0),
    ):
        try:
            call()
        except dm.DualmeshError as error:
            said.append(str(error))
    assert_same("own sequence", own, back, rtol=0)
    return full.tolist(), lengths, place, said


def test_lengths_are_exchanged_where_they_are_not_given():
    for rank, (full, lengths, place, said) in enumerate(wide_worlds()["torch"](exchanged_lengths, world_size=4)):
        assert full == [0.0, 1.0, 2.0, 10.0, 30.0, 31.0]
        assert (lengths, place) == (list(LENGTHS), rank)
        assert "is no group of State 'base'. Give an axis" in said[0]
        assert "fits none of lengths=(3, 1, 0, 2)" in said[1]
        assert "Give both or none" in said[2]
        assert "so 3 * 4 must divide it" in said[3]
