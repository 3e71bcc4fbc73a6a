"""A Prefect server for one command, where none is configured.

Prefect starts one by itself, but as a process that outlives a killed command. This one is started the same way and ends
with the command, however that ends.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import prefect
from prefect.settings import PREFECT_API_URL, temporary_settings

from planning.errors import LobraError
from training.parent_death import die_with_parent

START_SECONDS = 120.0
STOP_SECONDS = 10.0


@contextmanager
def prefect_server() -> Iterator[None]:
    """Use the configured Prefect server; without one, run a server on loopback for as long as the block lasts.

    Raises LobraError when the server does not come up. Call it from the main thread: the server ends with it.
    """
    if PREFECT_API_URL.value():
        yield
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command_pid = os.getpid()
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "uvicorn",
            "--factory",
            "prefect.server.api.server:create_app",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--log-level",
            "error",
            "--lifespan",
            "on",
            "--app-dir",
            str(Path(prefect.__file__).parents[1]),
        ],
        env={**os.environ, "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C ends the command, which still has its last state to report
        preexec_fn=lambda: die_with_parent(command_pid),
    )
    try:
        _wait_until_healthy(server, port)
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}):
            yield
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait_until_healthy(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/api/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise LobraError(
        "no temporary Prefect server came up; start one with `prefect server start` and set PREFECT_API_URL"
    )
