"""What a dtype is, how it travels, and in which dtype it is summed.

Communication backends carry few dtypes; the rest travels as bytes.
"""

import torch

from dualmesh.backend.collectives import Kind
from dualmesh.errors import ArrayTypeError

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_CARRIED = _FLOATS | {torch.uint8, torch.int8, torch.int32, torch.int64}
WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def _kind(dtype: torch.dtype) -> Kind:
    if dtype is torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "integer"


KINDS: dict[torch.dtype, Kind] = {
    dtype: _kind(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


def resolve_memory(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values: conjugates and negatives may be marks on another's memory."""
    return x.resolve_conj().resolve_neg()


def to_carried(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous array with at least one dim as something that every communication backend carries."""
    # Flat in between: a dim of size 1 may have any stride in a contiguous array, which no other dtype can be seen in.
    return x if x.dtype in _CARRIED else x.view(-1).view(x.shape).view(torch.uint8)


def wire(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous array of any shape as something that communication backends carry."""
    return x if x.dtype in _CARRIED else x.view(-1).view(torch.uint8)


def from_carried(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Take `to_carried` back on what arrived."""
    return x if x.dtype == dtype else x.view(dtype)


def summable(where: str, x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous array that communication backends reduce, the array itself where they can.

    Raises:
        ArrayTypeError: They cannot reduce the dtype.
    """
    if x.dtype in _CARRIED:
        return x.contiguous()
    if x.dtype in WIDENED:
        return x.to(WIDENED[x.dtype]).contiguous()
    if x.dtype in _PARTS:
        return torch.view_as_real(x.contiguous())
    raise ArrayTypeError(
        f"{where}: communication backends do not reduce {x.dtype}. Convert it first, for example to torch.float32.",
        dtype=x.dtype,
    )


def summable_copy(where: str, x: torch.Tensor) -> torch.Tensor:
    """Return `summable` in memory of its own."""
    if x.dtype in _CARRIED:
        return x.clone(memory_format=torch.contiguous_format)
    found = summable(where, x)
    return found.clone() if found.data_ptr() == x.data_ptr() else found


def unsummable(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Take `summable` back on a result."""
    if y.dtype == dtype:
        return y
    return torch.view_as_complex(y) if dtype in _PARTS else y.to(dtype)
