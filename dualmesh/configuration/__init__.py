"""Named states as settings: from files, variables, flags, arguments or plain data.

Flags are defined in `flags`, which is a module of the public face.
"""

from dualmesh.configuration.named_states import Configuration
from dualmesh.configuration.state_config import StateConfig

__all__ = ["Configuration", "StateConfig"]
