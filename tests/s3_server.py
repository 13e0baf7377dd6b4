"""A server of S3's protocol on loopback, in a process of its own: moto's, for as long as a test session."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 60


@contextmanager
def s3_server() -> Iterator[str]:
    """Start the server on a free port; yield its address."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(SECONDS * 20):
            try:
                request(f"http://127.0.0.1:{port}", "GET", "/")
                break
            except OSError:
                assert process.poll() is None, f"moto's server ended with {process.returncode}"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def request(server: str, method: str, path: str) -> bytes:
    """Make one unsigned request, which moto answers; return the answer."""
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=SECONDS)
    try:
        connection.request(method, path)
        return connection.getresponse().read()
    finally:
        connection.close()


def environment(server: str) -> dict[str, str]:
    """Return the usual variables for the server; any other ``AWS_...`` is to be unset, and no proxy to be asked."""
    return {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
