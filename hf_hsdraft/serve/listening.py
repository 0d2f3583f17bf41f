"""Listening sockets."""

from __future__ import annotations

import socket


def bound_socket(host: str, port: int) -> socket.socket:
    """Binds a port before anything is loaded, any free one for port 0; raises an OSError if it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen at {host} port {port} ({error}): choose another --host or --port") from None
    return taken
