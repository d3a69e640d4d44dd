"""How image embeddings move from the ranks that encode them to those that hold their tokens: VeOmni's plan of it."""

from collections.abc import Sequence

import torch

from dualmesh import ops
from dualmesh.errors import ArgumentError
from dualmesh_torch.veomni.groups import Group, axis_of, of_any_group


def all_to_all_images(image_embeds: torch.Tensor, in_splits: Sequence[int], out_splits: Sequence[int]) -> torch.Tensor:
    """Send the first rows to each ulysses rank in turn; without `in_splits`, nothing. *Collective over ulysses.*"""
    return _exchange(image_embeds, in_splits, out_splits) if in_splits else image_embeds


@of_any_group
def _exchange(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group = None) -> torch.Tensor:
    moved: torch.Tensor = ops.ragged_all_to_all(rows, axis_of(group), sent, received)
    return moved


def has_overlap(x1: int, x2: int, y1: int, y2: int) -> tuple[bool, int]:
    """Tell whether [x1, x2) and [y1, y2) overlap, and by how much: negative is the gap between them. *Pure.*"""
    start, stop = max(x1, y1), min(x2, y2)
    return start < stop, stop - start


def all2all_splits(
    image_lens: Sequence[int], image_lens_per_rank: Sequence[int], sp_size: int, sp_rank: int
) -> tuple[list[int], list[int]]:
    """Return the rows that a rank sends to each rank, and those that it receives from each. *Pure.*

    Images are encoded in equal runs: ceil(images / size) by each rank.

    Args:
        image_lens: Rows of every image of the batch, in order.
        image_lens_per_rank: Rows whose tokens each rank holds.

    Raises:
        ArgumentError: They do not add up to the same.
    """
    if sum(image_lens) != sum(image_lens_per_rank):
        raise ArgumentError(
            f"all2all_splits: image_lens add up to {sum(image_lens)}, image_lens_per_rank to "
            f"{sum(image_lens_per_rank)}. They must be equal.",
            image_lens=tuple(image_lens),
        )
    per_rank = -(-len(image_lens) // sp_size)
    encoded = [sum(image_lens[rank * per_rank : (rank + 1) * per_rank]) for rank in range(sp_size)]
    sent, kept = _runs(encoded), _runs(image_lens_per_rank)
    send = [_overlap(sent[sp_rank], kept[rank]) for rank in range(sp_size)]
    receive = [_overlap(sent[rank], kept[sp_rank]) for rank in range(sp_size)]
    return send, receive


def vlm_images_a2a_meta(
    sp_rank: int, sp_size: int, image_lens: Sequence[int], image_masks: torch.Tensor
) -> tuple[list[int], list[int], torch.Tensor]:
    """Plan how image embeddings move from the ranks that encode them to those that hold their tokens. *Pure.*

    Tokens lie in equal runs of the sequence. Returns the rows that this rank sends to each rank, those that it
    receives, and its part of the mask.

    Args:
        image_lens: Rows of every image of the batch, in order.
        image_masks: (batch, length), where tokens are images.
    """
    if sum(image_lens) != int(image_masks.sum()):
        raise ArgumentError(
            f"vlm_images_a2a_meta: image_lens add up to {sum(image_lens)}, but image_masks marks "
            f"{int(image_masks.sum())} tokens. They must be equal.",
            image_lens=tuple(image_lens),
        )
    masks = torch.split(image_masks, -(-image_masks.shape[1] // sp_size), dim=1)
    held = [int(mask.sum()) for mask in masks] + [0] * (sp_size - len(masks))
    send, receive = all2all_splits(image_lens, held, sp_size, sp_rank)
    return send, receive, masks[sp_rank] if sp_rank < len(masks) else image_masks[:, :0]


def _runs(lengths: Sequence[int]) -> list[range]:
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _overlap(one: range, other: range) -> int:
    return max(0, has_overlap(one.start, one.stop, other.start, other.stop)[1])
