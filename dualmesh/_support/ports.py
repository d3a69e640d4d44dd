"""Where processes meet: host names and free ports.

Who meets there, and for what, is in `launch` and the backends.
"""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of this machine that nobody listens on. *Local.*"""
    with socket.socket() as server:
        server.bind((host, 0))
        port: int = server.getsockname()[1]
        return port
