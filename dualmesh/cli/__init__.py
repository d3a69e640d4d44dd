"""The command line: see what is about to be launched, and find what is wrong with a machine.

Each command is a module; what topologies answer to code is in `topology`, how they look in `pictures`.
"""

from dualmesh.cli.app import main, run

__all__ = ["main", "run"]
