"""The listener on a real store: it wakes who waits, ends when closed, and says when the store is gone."""

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from training.fleet_spec import READY, report_key
from training.report_listener import ReportListener

NUM_RANKS = 2


def start_server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def listening() -> Callable[[dist.TCPStore], ReportListener]:
    """`listening(server)`: a listener with a client of its own."""

    def start(server: dist.TCPStore) -> ReportListener:
        return ReportListener(dist.TCPStore("127.0.0.1", server.port, is_master=False), NUM_RANKS)

    return start


def listeners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fleet-reports"]


def report(server: dist.TCPStore, number: int, rank: int) -> None:
    server.set(report_key(number, rank), "{}")


def test_a_command_is_answered_when_the_last_rank_has_reported(listening: Callable) -> None:
    server = start_server()
    listener = listening(server)
    report(server, READY, 0)
    assert not listener.wait(READY, 0.1)
    threading.Timer(0.1, report, (server, READY, 1)).start()
    assert listener.wait(READY, 10)
    assert not listener.wait(READY + 1, 0.1)
    for rank in range(NUM_RANKS):
        report(server, READY + 1, rank)
    assert listener.wait(READY + 1, 10)
    listener.close(server)


def test_closing_ends_the_thread(listening: Callable) -> None:
    server = start_server()
    listener = listening(server)
    assert len(listeners()) == 1
    listener.close(server)
    assert not listeners()


def test_a_store_that_is_gone_is_an_error_at_once_not_a_long_wait(listening: Callable) -> None:
    server = start_server()
    listener = listening(server)
    assert not listener.wait(READY, 0.1)
    del server
    with pytest.raises(ConnectionError, match="the fleet's store does not answer"):
        listener.wait(READY, 60)
    assert not listeners()
