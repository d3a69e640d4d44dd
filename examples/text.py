"""Real text: the source files of the Python standard library on this machine, as batches of bytes."""

import sysconfig
from pathlib import Path

import numpy as np

BUDGET = 400_000


def corpus(path: str | None = None) -> np.ndarray:
    """Return text as bytes, uint8: a file, or the standard library's modules by name up to a few hundred KB.

    Raises:
        ValueError: The file cannot be read, or is too short to train on.
    """
    if path is not None:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"--text {path}: {error.strerror}. Give a readable file.") from None
        if len(text) < 10_000:
            raise ValueError(f"--text {path}: {len(text)} bytes are too few to train on. Give at least 10000.")
        return np.frombuffer(text, np.uint8)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text, used = b"", 0
    while len(text) < BUDGET and used < len(files):
        text += files[used].read_bytes()
        used += 1
    return np.frombuffer(text[:BUDGET], np.uint8)


def batch(text: np.ndarray, step: int, *, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, targets) of a step, int32, shape (size, length); the same on every process."""
    starts = np.random.default_rng(step).integers(0, len(text) - length, size)
    windows = np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)
    return windows[:, :-1], windows[:, 1:]
