"""What may be wrong with a machine and its environment, each found and explained; nothing here loads a framework.

Frameworks are asked in fresh processes, in `framework_probes`.
"""

import os
import platform
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Literal, NamedTuple

from dualmesh._support import versions, waits
from dualmesh._support.optional_imports import metadata
from dualmesh.backend import discovery
from dualmesh.config import Configuration
from dualmesh.config.named_states import settings_in
from dualmesh.errors import DualmeshError, did_you_mean, listed
from dualmesh.runtime import environment

Status = Literal["ok", "note", "problem"]

DEFAULT_PORT = 29500
"""Where torchrun meets when no port is given."""
REQUIRED = ("numpy", "array-api-compat")
"""What dualmesh stands on whatever the backend."""
_REQUIREMENT = re.compile(r"(?P<package>[\w.-]+)\s*>=\s*(?P<least>[\d.]+)")
_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    status: Status
    found: str
    cure: str = ""


def frameworks() -> list[str]:
    """Return the names of the backends that need a framework. *Local.*"""
    return [name for name in discovery.available() if name != "sim"]


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None. *Local.*"""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages() -> Iterator[Finding]:
    """Look at versions: Python, dualmesh, frameworks. *Local.*"""
    own = installed_version(discovery.OWN)
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    if own is None or not discovery.available():
        yield Finding(
            "dualmesh",
            "problem",
            "dualmesh is on the path but not installed, so no backend is found",
            "Install it: pip install . in its folder",
        )
        return
    yield Finding("dualmesh", "ok", f"{own}, backends: {listed(discovery.available())}")
    least = least_versions()
    there = {name: version for name in frameworks() if (version := installed_version(name)) is not None}
    if not there:
        choices = listed(discovery.requirements(name) for name in frameworks())
        yield Finding(
            "frameworks",
            "problem",
            f"no framework is installed: neither of {listed(frameworks())}",
            f"pip install one of {choices}; backend='sim' works without",
        )
    there |= {name: version for name in REQUIRED if (version := installed_version(name)) is not None}
    for name, version in there.items():
        wanted = least.get(name)
        if wanted is not None and versions.is_older(version, wanted):
            found = versions.TOO_OLD.format(name=name, found=version, least=wanted)
            yield Finding(name, "problem", found, versions.CURE.format(name=name, least=wanted))


def least_versions() -> dict[str, str]:
    """Return the oldest version of each package that dualmesh and its extras ask for. *Local.*"""
    matches = (_REQUIREMENT.match(line) for line in metadata.requires(discovery.OWN) or ())
    return {match["package"]: match["least"] for match in matches if match is not None}


def variables(env: Mapping[str, str]) -> Iterator[Finding]:
    """Look at what launchers and people set. *Local.*"""
    checks: dict[str, Callable[[], object]] = {
        "launcher": lambda: environment.launch_from(env),
        "settings": lambda: settings_in(env),
        waits.TIMEOUT_VARIABLE: lambda: waits.timeout_s(None, env),
        "DUALMESH_CONFIG": lambda: Configuration.from_environment(env),
    }
    said = []
    for name, check in checks.items():
        try:
            check()
        except DualmeshError as error:
            if str(error) not in said:
                said.append(str(error))
                yield Finding(f"environment: {name}", "problem", *halves(str(error)))
    backend = env.get(discovery.VARIABLE)
    names = discovery.available()
    if backend and backend not in names:
        hint = did_you_mean(backend, names)
        found = f"{discovery.VARIABLE}={backend!r} is no backend. Backends: {listed(names)}.{hint}"
        yield Finding(f"environment: {discovery.VARIABLE}", "problem", found, "Set it to one of these, or unset it")
    if not said:
        launched = [name for name in environment.TORCHRUN if env.get(name)]
        yield Finding("environment", "ok", f"launcher variables: {listed(launched)}")


def ports(env: Mapping[str, str]) -> Iterator[Finding]:
    """Look whether the port is free where the processes are to meet, if that is this machine. *Local.*"""
    host, text = env.get("MASTER_ADDR") or "127.0.0.1", env.get("MASTER_PORT") or str(DEFAULT_PORT)
    if text == "0" or env.get("RANK", "0") != "0" or not _is_here(host):
        return  # 0 lets the launcher choose; elsewhere other processes listen
    if not text.isdecimal() or int(text) >= 65536:
        yield Finding("port", "problem", f"MASTER_PORT={text!r} is no port", "Set it to a number below 65536")
    elif is_free(int(text)):
        yield Finding("port", "ok", f"{host}:{text} is free")
    else:
        by_default = "" if env.get("MASTER_PORT") else ", where torchrun meets when no port is given"
        cure = "Choose another: MASTER_PORT, or torchrun --master-port. Or end what listens there"
        yield Finding("port", "problem", f"port {text} of this machine is in use{by_default}", cure)


def is_free(port: int) -> bool:
    """Tell whether a TCP port of this machine can be listened on. *Local.*"""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those who will listen there do
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True


def _is_here(host: str) -> bool:
    return host in _LOCAL or host in (socket.gethostname(), socket.getfqdn(), os.uname().nodename)


def halves(message: str) -> tuple[str, str]:
    """Split an error into what was found and what to do, which dualmesh says last. *Pure.*"""
    sentences = re.split(r"(?<=\.)\s+(?=[A-Z])", message)
    return " ".join(sentences[:-1]) or message, sentences[-1] if sentences[1:] else ""
