"""`Party`: this rank's place in a process group, remembered by forward for backward."""

import torch.distributed as dist


class Party:
    """A group, its name (a constant in compiled graphs), its size, and this rank's index in it."""

    __slots__ = ("group", "index", "is_gloo", "name", "size")

    def __init__(self, group: dist.ProcessGroup, size: int, index: int) -> None:
        self.group = group
        self.name: str = group.group_name
        self.is_gloo: bool = dist.get_backend(group) == "gloo"
        self.size = size
        self.index = index
