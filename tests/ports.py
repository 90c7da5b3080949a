"""A port for a server that cannot choose one itself."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Below those that the system gives out: nobody who asks for any port is given it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
