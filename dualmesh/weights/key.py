"""The secret that processes of several worlds share: who does not know it is not listened to.

What it protects is in docs/security.md; how it is proved is in `channel`.
"""

import hashlib
import os
import secrets
import tempfile
from pathlib import Path

from dualmesh.errors import ArgumentError, SessionError

VARIABLE = "DUALMESH_TRANSFER_KEY"


def find_key(where: str, given: str | bytes | None) -> bytes:
    """Return the secret: the argument, DUALMESH_TRANSFER_KEY, or that of this user, made when first asked for. *Local.*

    Raises:
        ArgumentError: The argument is no text.
        SessionError: There is none, and the user's cannot be kept.
    """
    if given is None:
        given = os.environ.get(VARIABLE) or None
    if given is not None and (not isinstance(given, str | bytes) or not given):
        raise ArgumentError(f"{where}: key is a {type(given).__name__}. Give a non-empty text, or None.")
    secret = _users_secret(where) if given is None else given
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()


def _users_secret(where: str) -> bytes:
    """Return what this user's processes share, in a file that nobody else can read."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(cache) / "dualmesh" / "transfer_key"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written aside and linked: of processes that come at once, all find the first one's.
            with tempfile.NamedTemporaryFile(dir=path.parent) as file:
                file.write(secrets.token_hex(32).encode())
                file.flush()
                try:
                    os.link(file.name, path)
                except FileExistsError:
                    pass
        found = path.read_bytes()
    except OSError as error:
        raise SessionError(
            f"{where}: there is no key, and this user's cannot be kept in {path}: {error}. Give key=, or set "
            f"{VARIABLE}, the same in all processes."
        ) from error
    if path.stat().st_mode & 0o077:
        raise SessionError(f"{where}: {path} can be read by others. Delete it, or give key= or {VARIABLE}.")
    return found
