"""Specs as plain data, for processes that tell each other how their arrays lie.

What specs mean is in `partition_spec` and `transfer_ends`.
"""

from collections.abc import Mapping
from typing import Any

from dualmesh.partition_spec import P
from dualmesh.transfer_ends import Fused


def to_data(specs: Any) -> Any:
    """Return specs by path, or one for all, as plain data. *Pure.*

    >>> from_data(to_data({"w": P("tp", None)}))
    {'w': P('tp', None)}
    """
    if isinstance(specs, Mapping):
        return {"paths": {path: to_data(spec) for path, spec in specs.items()}}
    if isinstance(specs, Fused):
        return {"fused": to_data(specs.spec), "parts": [list(part) for part in specs.parts], "dim": specs.dim}
    return {"entries": [list(e) if isinstance(e, tuple) else e for e in specs.entries], "partial": list(specs.partial)}


def from_data(data: Mapping[str, Any]) -> Any:
    """Return what `to_data` made plain. *Pure.*"""
    if "paths" in data:
        return {path: from_data(spec) for path, spec in data["paths"].items()}
    if "fused" in data:
        return Fused(from_data(data["fused"]), {name: size for name, size in data["parts"]}, data["dim"])
    return P(*data["entries"], partial=data["partial"])
