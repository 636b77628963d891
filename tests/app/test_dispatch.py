"""Who gets which connection, and that none is lost between the supervisor and its workers."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from app.dispatch import _AT_ONCE, ENDED, READY, RELOAD, TAKEN, Channel, Dispatcher
from app.sockets import make_socket


class Service:
    """A supervisor's dispatcher with the workers' ends of its channels, and clients."""

    def __init__(self) -> None:
        self.listener = make_socket("127.0.0.1", 0)
        self.address = self.listener.getsockname()
        self.dispatcher = Dispatcher(self.listener)
        self.clients: list[socket.socket] = []
        self.ends: list[socket.socket] = []
        self.taken: dict[Channel, list[socket.socket]] = {}

    def worker(self, *, ready: bool = True) -> Channel:
        end = self.dispatcher.add()
        self.ends.append(end)
        channel = Channel(end)
        self.taken[channel] = []
        if ready:
            channel.say(READY)
        return channel

    def connect(self, count: int) -> None:
        self.clients += [socket.create_connection(self.address, 5.0) for _ in range(count)]

    def turn(self) -> None:
        """Until there is nothing to do, or nothing that can be done now."""
        for _ in range(30):
            if not self.dispatcher.turn(0.05):
                break

    def receive(self, *channels: Channel) -> list[int]:
        """How many connections each worker has been given since the last call."""
        self.turn()
        counts = []
        for channel in channels:
            taken = self.taken[channel]
            before = len(taken)
            while (news := channel.receive()) and news.connections:
                taken += news.connections
            counts.append(len(taken) - before)
        return counts

    def works(self) -> bool:
        """Whether what is sent by each connection that was taken comes to the client that made it."""
        for connection in chain(*self.taken.values()):
            connection.sendall(str(connection.getpeername()[1]).encode())
        return all(client.recv(8) == str(client.getsockname()[1]).encode() for client in self.clients)

    def close(self) -> None:
        if self.listener.fileno() != -1:
            self.dispatcher.close()
        for each in (*self.clients, *self.ends, *chain(*self.taken.values())):
            each.close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


def test_a_burst_is_shared_out_evenly_and_every_connection_works(service: Service) -> None:
    channels = [service.worker() for _ in range(3)]
    service.turn()
    service.connect(12)
    assert service.receive(*channels) == [4, 4, 4]
    assert service.works()


def test_the_next_connections_go_where_the_fewest_are(service: Service) -> None:
    first, second = service.worker(), service.worker()
    service.turn()
    service.connect(8)
    assert service.receive(first, second) == [4, 4]
    second.say(ENDED)
    second.say(ENDED + ENDED)
    service.turn()
    service.connect(3)
    assert service.receive(first, second) == [0, 3]


def test_connections_wait_until_a_worker_is_ready(service: Service) -> None:
    late = service.worker(ready=False)
    service.connect(3)
    assert service.receive(late) == [0]
    late.say(READY)
    assert service.receive(late) == [3]


def test_a_worker_that_is_gone_gets_none(service: Service) -> None:
    first, second = service.worker(), service.worker()
    service.turn()
    service.ends[0].close()
    service.connect(4)
    service.turn()
    assert service.receive(first, second) == [0, 4]
    assert first.fileno() == -1


def test_what_a_worker_died_without_taking_goes_to_another(service: Service) -> None:
    _, second = service.worker(), service.worker()
    service.turn()
    service.connect(6)
    assert service.receive(second) == [3]
    service.ends[0].close()
    assert service.receive(second) == [3]
    assert service.works()


def test_a_worker_that_leaves_takes_what_was_sent_and_no_more(service: Service) -> None:
    first, second = service.worker(), service.worker()
    service.turn()
    service.connect(4)
    service.turn()
    service.taken[first] += first.leave()
    assert len(service.taken[first]) == 2
    service.connect(4)
    assert service.receive(first, second) == [0, 6]


def test_what_no_worker_can_take_now_is_kept_for_later(service: Service) -> None:
    busy = service.worker()
    service.turn()
    service.connect(600)  # More than a channel has room for.
    service.turn()
    other = service.worker()
    taken = [0, 0]
    while sum(taken) < 600 and min(new := service.receive(busy, other)) >= 0 and any(new):
        taken = [before + more for before, more in zip(taken, new, strict=True)]
    assert sum(taken) == 600
    assert min(taken) > 0


def test_a_worker_that_takes_nothing_gets_only_so_many(service: Service) -> None:
    service.worker()
    service.turn()
    service.connect(70)
    service.turn()
    assert service.receive(service.worker()) == [70 - _AT_ONCE]


def test_a_channel_that_is_full_for_a_moment_is_used_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = service.worker()
    service.turn()
    send, failures = socket.send_fds, [OSError(errno.ENOBUFS, "full")]

    def send_fds(*arguments: Any) -> int:
        if failures:
            raise failures.pop()
        return send(*arguments)

    monkeypatch.setattr(socket, "send_fds", send_fds)
    service.connect(2)
    assert service.receive(worker) == [2]
    assert not failures


def test_the_others_reload_too_and_one_that_starts_when_it_is_ready(service: Service) -> None:
    first, second, late = service.worker(), service.worker(), service.worker(ready=False)
    second.say(ENDED + RELOAD)
    service.turn()
    assert [channel.receive() for channel in (first, second, late)] == [([], True), ([], False), ([], True)]
    service.dispatcher.reload()
    assert [channel.receive() for channel in (first, second)] == [([], True)] * 2


def test_closing_hands_out_what_has_connected_and_refuses_the_rest(service: Service) -> None:
    channel = service.worker()
    service.turn()
    service.connect(5)
    service.dispatcher.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(service.address, 1.0)
    news = channel.receive()
    assert news is not None
    service.taken[channel] += news.connections
    assert len(news.connections) == 5
    assert channel.receive() is None


def test_a_worker_learns_that_the_supervisor_is_gone() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    assert channel.receive() == ([], False)
    ours.close()
    channel.say(ENDED)
    assert channel.receive() is None
    theirs.close()


def test_a_connection_that_a_process_has_no_room_for_is_counted_as_ended() -> None:
    ours, theirs = socket.socketpair()
    ours.send(b"c")  # What is left of a message when the kernel has dropped its descriptor.
    assert Channel(theirs).receive() == ([], False)
    assert ours.recv(8) == TAKEN + ENDED
    ours.close()
    theirs.close()


def test_connections_wait_while_there_are_no_descriptors_and_it_is_said_once(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    worker = service.worker()
    service.turn()
    service.connect(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with caplog.at_level("INFO", logger="psc.dispatch"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            for _ in range(20):
                service.dispatcher.turn(0.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert service.receive(worker) == [2]
        assert service.works()
    assert caplog.messages[1:] == ["accepts connections again"]
