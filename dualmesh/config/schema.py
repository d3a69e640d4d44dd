"""The one schema of a state's settings: names, kinds and help, whichever way they arrive.

Reading text (files, flags, variables) is in the rooms that read it; what settings become is in `state_config`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from dualmesh.errors import SpecError, did_you_mean, listed

Kind = Literal["size", "sizes", "words", "yesno", "yesnos", "word"]

ENDING = "_size"
"""May be left out of a setting's name: dp_shard is dp_shard_size."""


class Field(NamedTuple):
    """A setting that has one name in files, flags, arguments, dataclasses and variables."""

    name: str
    kind: Kind
    help: str


FIELDS = (
    Field("dp_size", "size", "data parallel: dp_replicate_size * dp_shard_size; alone it means dp_shard_size"),
    Field("dp_replicate_size", "size", "replicas of the sharded parameters"),
    Field("dp_shard_size", "size", "data-parallel ranks that share the parameters; -1 is inferred"),
    Field("ulysses_size", "size", "Ulysses sequence parallel"),
    Field("cp_size", "size", "context (ring) parallel"),
    Field("tp_size", "size", "tensor parallel"),
    Field("pp_size", "size", "pipeline stages"),
    Field("ep_size", "size", "expert parallel, over dp_shard x ulysses x cp"),
    Field("ep_over", "words", "the axes that experts span, instead of dp_shard, ulysses, cp"),
    Field("extra_parallel_names", "words", "names of further views"),
    Field("extra_parallel_sizes", "sizes", "their sizes, one per name"),
    Field("extra_parallel_outermost", "yesnos", "whether each is outside its NAME_fsdp"),
    Field("dp_mode", "word", "fsdp2, fsdp1 or ddp"),
    Field("device_type", "word", "cpu, cuda, ..."),
    Field("async_enabled", "yesno", "kept for the trainer"),
    Field("own_groups", "yesno", "communicators of its own"),
)
BY_NAME: Mapping[str, Field] = {field.name: field for field in FIELDS}
SPEC_FIELDS = tuple(field.name for field in FIELDS[:12])
"""The settings that `parallel_spec` takes."""

_YES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_WORDS: Mapping[Kind, str] = {
    "size": "an integer",
    "sizes": "integers, comma separated",
    "words": "names, comma separated",
    "yesno": "true or false",
    "yesnos": "true or false, comma separated",
    "word": "a word",
}


def canonical(name: str, known: Iterable[str]) -> str | None:
    """Return the full name of a setting, or None. *Pure.*

    >>> canonical("dp_shard", BY_NAME), canonical("dp_shard_size", BY_NAME), canonical("dp_shart", BY_NAME)
    ('dp_shard_size', 'dp_shard_size', None)
    """
    known = set(known)
    return name if name in known else f"{name}{ENDING}" if f"{name}{ENDING}" in known else None


def hint(name: str, known: Iterable[str]) -> str:
    """Write what else a wrong name may have meant: " Did you mean 'x'?", or all that there are. *Pure.*"""
    known = list(known)
    short = {key.removesuffix(ENDING): key for key in known}
    found = did_you_mean(name, [*known, *short])
    return found or f" Known: {listed(known, limit=40)}."


def parse_setting(field: Field, text: str, where: str) -> Any:
    """Read a setting from text, as flags and variables give it. *Pure.*

    Args:
        field: The setting.
        text: What was given.
        where: What messages call the place, for example "--tp_size".

    Raises:
        SpecError: It is not of the setting's kind.

    >>> parse_setting(BY_NAME["extra_parallel_sizes"], "2,4", "--extra_parallel_sizes")
    (2, 4)
    """
    readers: dict[Kind, Callable[[str], Any]] = {
        "size": int,
        "word": str,
        "yesno": lambda part: _YES[part.lower()],
    }
    one: dict[Kind, Kind] = {"sizes": "size", "words": "word", "yesnos": "yesno"}
    try:
        if field.kind in one:
            return tuple(readers[one[field.kind]](part.strip()) for part in text.split(",") if part.strip())
        return readers[field.kind](text.strip())
    except (ValueError, KeyError):
        raise SpecError(f"{where}={text!r}: give {_WORDS[field.kind]}.", found=text) from None
