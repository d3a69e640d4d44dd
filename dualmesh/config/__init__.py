"""Named states as settings: from files, variables, flags, arguments or plain data.

Flags are defined in `flags`, which is a module of the public face.
"""

from dualmesh.config.named_states import Configuration
from dualmesh.config.state_config import StateConfig

__all__ = ["Configuration", "StateConfig"]
