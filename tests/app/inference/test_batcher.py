"""The batching state machine under random arrivals, cancellations, errors and a simulated clock."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.errors import NotReady, QueueFull
from app.inference.batcher import Batcher, BatchTimes, DeviceBatch, QueuedRequest, RequestMode, RequestQueue, State
from tests.app.inference.support import EXPLAIN, NO_IMAGES, PREDICT, admit, complete, make


def parts(batch: DeviceBatch | None) -> list[tuple[QueuedRequest, int, int]]:
    assert batch is not None
    return [(part.request, part.start, part.stop) for part in batch.slices]


def run(batcher: Batcher, count: int, now: float, seconds: float, mode: RequestMode = PREDICT) -> None:
    admit(batcher, count, now=now, mode=mode)
    batch = batcher.take(now)
    assert batch is not None
    complete(batcher, batch, now + seconds)


class Simulation(RuleBasedStateMachine):
    """No loss, no duplication, no misalignment, bounded memory, whatever happens in whatever order."""

    @initialize(
        batch=st.integers(1, 20),
        queue=st.integers(1, 60),
        delay=st.sampled_from([0.0, 0.5]),
        shares_cores=st.booleans(),
    )
    def begin(self, batch: int, queue: int, delay: float, shares_cores: bool) -> None:
        self.max_batch, self.max_queue, self.delay = batch, queue, delay
        self.batcher = make(batch, queue, delay, shares_cores=shares_cores)
        self.now = 0.0
        self.reserved: list[QueuedRequest] = []
        self.admitted: list[QueuedRequest] = []
        self.running: list[DeviceBatch] = []
        self.finished: list[QueuedRequest] = []
        self.results: dict[QueuedRequest, list[int | None]] = {}
        self.closed = False

    def gather(self) -> None:
        self.finished += self.batcher.collect()

    @rule(count=st.integers(1, 30), urgent_at=st.floats(0.1, 5.0), mode=st.sampled_from([PREDICT, EXPLAIN]))
    def reserve(self, count: int, urgent_at: float, mode: RequestMode) -> None:
        before = self.batcher.pending
        try:
            request = self.batcher.reserve(count, now=self.now, deadline=self.now + urgent_at, mode=mode)
        except QueueFull as error:
            assert 1 <= error.retry_after <= 60
            assert before + count > self.max_queue or before > 0
            assert self.batcher.pending == before
        except NotReady:
            assert self.closed
        else:
            assert not self.closed
            self.admitted.append(request)
            self.reserved.append(request)
            self.results[request] = [None] * count

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        request = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        assert self.batcher.put(request, NO_IMAGES, now=self.now) == (request.state is State.QUEUED)

    @rule(least=st.integers(1, 4))
    def take(self, least: int) -> None:
        due = self.batcher.due_in(self.now, least=least)
        batch = self.batcher.take(self.now, least=least)
        if batch is None:
            self.gather()
            return
        assert due == 0.0
        assert 1 <= batch.size <= self.max_batch
        assert batch.size == sum(part.stop - part.start for part in batch.slices)
        for part in batch.slices:
            assert part.request.mode == batch.mode
            assert part.request.deadline > self.now
            for image in range(part.start, part.stop):
                assert self.results[part.request][image] is None, "handed out twice"
                self.results[part.request][image] = -1
        self.running.append(batch)
        self.gather()

    @precondition(lambda self: self.running)
    @rule()
    def complete(self) -> None:
        batch = self.running.pop(0)
        for part in batch.slices:
            for image in range(part.start, part.stop):
                self.results[part.request][image] = image
        complete(self.batcher, batch, self.now)
        self.gather()

    @precondition(lambda self: self.running)
    @rule()
    def fail_batch(self) -> None:
        for part in self.running.pop(0).slices:
            self.batcher.finish(part.request, RuntimeError("device"))
        self.gather()

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.batcher.cancel(self.admitted[data.draw(st.integers(0, len(self.admitted) - 1))])
        self.gather()

    @rule(seconds=st.floats(0.0, 2.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.batcher.expire(self.now)
        self.gather()

    @rule()
    def close(self) -> None:
        self.batcher.close("draining")
        self.closed = True

    @invariant()
    def bounded_and_booked(self) -> None:
        alive = [request for request in self.admitted if request.state is not State.FINISHED]
        assert self.batcher.pending == sum(request.count - request.n_taken for request in alive) <= self.max_queue
        assert len(self.finished) == len(set(self.finished))
        assert set(self.finished) == {request for request in self.admitted if request.state is State.FINISHED}
        assert set(self.batcher._live) == set(alive), "a finished request is kept, or a live one forgotten"

    @invariant()
    def aligned(self) -> None:
        for request in self.finished:
            if request.error is None:
                assert self.results[request] == list(range(request.count))

    def teardown(self) -> None:
        if not hasattr(self, "batcher"):
            return
        while self.reserved:
            self.batcher.put(self.reserved.pop(), NO_IMAGES, now=self.now)
        for batch in self.running:
            complete(self.batcher, batch, self.now)
        self.now += self.delay
        while (batch := self.batcher.take(self.now)) is not None:
            complete(self.batcher, batch, self.now)
        self.gather()
        assert not self.batcher._live and set(self.finished) == set(self.admitted), "a request was lost"


TestSimulation = Simulation.TestCase


def test_large_request_does_not_starve_single_images() -> None:
    batcher = make(batch=16, queue=2000)
    large = admit(batcher, 500)
    first = batcher.take(0.0)
    assert parts(first) == [(large, 0, 16)]
    singles = [admit(batcher, 1) for _ in range(10)]
    batch = batcher.take(0.0)
    assert {request for request, _, _ in parts(batch)} == {large, *singles}


def test_single_images_do_not_starve_a_large_request() -> None:
    batcher = make(batch=16, queue=2000)
    large = admit(batcher, 100)
    for _ in range(200):
        for _ in range(16):
            admit(batcher, 1)
        batch = batcher.take(0.0)
        if batch is None or large.state is State.RUNNING:
            break
    assert large.state is State.RUNNING


def test_delay_ends_when_the_batch_is_full_or_old() -> None:
    batcher = make(batch=2, delay=1.0)
    admit(batcher, 1, now=0.0)
    assert batcher.take(0.5) is None
    assert batcher.due_in(0.25) == 0.75
    assert batcher.take(1.0) is not None
    admit(batcher, 1, now=2.0)
    admit(batcher, 1, now=2.0)
    assert batcher.take(2.0) is not None


def test_cancelled_request_does_not_end_the_delay_of_others() -> None:
    batcher = make(batch=8, delay=1.0)
    large = admit(batcher, 12)
    assert batcher.take(0.0) is not None
    batcher.cancel(large)
    admit(batcher, 1)
    assert batcher.due_in(0.0) == 1.0


def patient(*, gap: float, shares_cores: bool = True, elsewhere: Callable[[], int] = lambda: 0) -> Batcher:
    """A batcher of which a batch takes 1 s and 0.1 s an image, with requests coming ``gap`` seconds apart."""
    batcher, now = make(batch=8, shares_cores=shares_cores, elsewhere=elsewhere), -100.0
    for count in (1, 8):
        request = batcher.reserve(count, now=now, deadline=1e9)
        batcher.put(request, NO_IMAGES, now=now + gap)
        batch = batcher.take(now + gap)
        assert batch is not None
        complete(batcher, batch, now + gap + 1 + 0.1 * count)
        now += 50
    return batcher


def test_batch_waits_for_requests_in_decoding_while_that_pays() -> None:
    batcher = patient(gap=0.5)
    first, second, third, fourth = (batcher.reserve(1, now=0.0, deadline=1e9) for _ in range(4))
    batcher.put(first, NO_IMAGES, now=0.5)  # 3 s saved for those in decoding, but one comes each half a second.
    assert batcher.due_in(0.5) == pytest.approx(2.0)
    assert batcher.take(0.5) is None
    batcher.put(second, NO_IMAGES, now=1.0)  # 2 s saved, two wait.
    assert batcher.due_in(1.0) == pytest.approx(1.0)
    batcher.put(third, NO_IMAGES, now=1.5)  # A third of a second, and the next one comes in half a second.
    assert batcher.due_in(1.5) == 0.0
    assert parts(batcher.take(1.5)) == [(first, 0, 1), (second, 0, 1), (third, 0, 1)]
    batcher.put(fourth, NO_IMAGES, now=2.0)
    assert parts(batcher.take(2.0)) == [(fourth, 0, 1)]


def test_batch_waits_for_requests_that_another_process_decodes() -> None:
    coming = [3]
    batcher = patient(gap=0.5, elsewhere=lambda: coming[0])
    first, second = (batcher.reserve(1, now=now, deadline=1e9, came=0.0) for now in (0.5, 1.0))
    batcher.put(first, NO_IMAGES, now=0.5)  # As if it had been reserved when it came.
    assert batcher.due_in(0.5) == pytest.approx(2.0)
    coming[0] = 0
    assert batcher.due_in(0.5) == pytest.approx(1.0)  # The second one is reserved.
    batcher.put(second, NO_IMAGES, now=1.0)
    assert parts(batcher.take(1.0)) == [(first, 0, 1), (second, 0, 1)]


def test_batch_waits_for_nobody_who_has_left() -> None:
    batcher = patient(gap=0.5)
    first, second = (batcher.reserve(1, now=0.0, deadline=1e9) for _ in range(2))
    batcher.put(first, NO_IMAGES, now=0.5)
    assert batcher.take(0.5) is None
    batcher.cancel(second)
    assert parts(batcher.take(0.5)) == [(first, 0, 1)]


@pytest.mark.parametrize(
    ("gap", "shares_cores", "is_patient"), [(2.0, True, True), (0.5, False, True), (0.5, True, False)]
)
def test_batch_leaves_at_once_where_waiting_saves_nothing(gap: float, shares_cores: bool, is_patient: bool) -> None:
    batcher = patient(gap=gap, shares_cores=shares_cores)
    first, _ = (batcher.reserve(1, now=0.0, deadline=1e9) for _ in range(2))
    batcher.put(first, NO_IMAGES, now=gap)
    assert parts(batcher.take(gap, patient=is_patient)) == [(first, 0, 1)]


def test_least_waits_for_so_many_images() -> None:
    batcher = make(batch=4)
    admit(batcher, 2)
    assert batcher.take(0.0, least=3) is None
    admit(batcher, 1)
    assert batcher.take(0.0, least=3) is not None


def test_modes_take_turns_in_batches_of_their_own() -> None:
    batcher = make(batch=4)
    for _ in range(2):
        admit(batcher, 4, mode=PREDICT)
        admit(batcher, 4, mode=EXPLAIN)
    taken = [batcher.take(0.0) for _ in range(4)]
    assert [batch.mode for batch in taken if batch] == [PREDICT, EXPLAIN, PREDICT, EXPLAIN]


def test_retry_after_follows_the_measured_drain_rate() -> None:
    batcher = make(batch=10, queue=100)
    run(batcher, 10, 0.0, 1.0)
    admit(batcher, 95, now=1.0)
    with pytest.raises(QueueFull) as caught:
        batcher.reserve(10, now=1.0, deadline=1e9)
    assert caught.value.retry_after == 10


def test_burst_after_quiet_is_not_timed_by_batches_of_one() -> None:
    batcher = make(batch=64, queue=4000)
    for second in range(5):
        run(batcher, 1, second, 0.01)
    requests = [admit(batcher, 32, now=9.0, deadline=19.0) for _ in range(60)]
    now = 9.0
    while (batch := batcher.take(now)) is not None:  # 10 ms and 0.2 ms an image
        now += 0.01 + 0.0002 * batch.size
        complete(batcher, batch, now)
    assert all(request.state is State.FINISHED and request.error is None for request in requests)


def test_refuses_what_cannot_be_answered_in_time() -> None:
    batcher = make(batch=10, queue=100)
    run(batcher, 10, 0.0, 1.0)
    for _ in range(50):  # At 10 a second: a turn in 5 s, which may be a third of the time left.
        admit(batcher, 1, now=1.0)
    with pytest.raises(QueueFull):
        batcher.reserve(1, now=1.0, deadline=13.0)
    batcher.reserve(1, now=1.0, deadline=16.5)


def with_slow_explanations() -> Batcher:
    batcher, now = make(batch=10, queue=100), -1000.0
    for mode, seconds in ((PREDICT, 0.1), (EXPLAIN, 3.0)):
        run(batcher, 10, now, seconds, mode)
        now += 100
    return batcher


def test_slow_explanations_do_not_refuse_plain_requests() -> None:
    batcher = with_slow_explanations()
    for _ in range(5):
        admit(batcher, 10)
    admit(batcher, 1, deadline=3.0)  # Behind half a second of images.
    with pytest.raises(QueueFull) as caught:
        admit(batcher, 51)
    assert caught.value.retry_after == 1


def test_explanations_are_refused_by_their_own_times() -> None:
    batcher = with_slow_explanations()
    admit(batcher, 10, mode=EXPLAIN)
    with pytest.raises(QueueFull):
        admit(batcher, 10, deadline=3.0, mode=EXPLAIN)


def test_plain_request_waits_for_a_batch_of_explanations_a_turn() -> None:
    batcher = with_slow_explanations()
    for _ in range(4):
        admit(batcher, 10, mode=EXPLAIN)
    admit(batcher, 10)
    admit(batcher, 1, deadline=10.0)  # 3 s for explanations, and an image of the request before it.
    with pytest.raises(QueueFull):
        admit(batcher, 10, deadline=15.0)


def test_batch_behind_one_of_another_mode_is_timed_from_its_end() -> None:
    batcher = make(batch=4)
    for mode in (PREDICT, EXPLAIN):
        admit(batcher, 4, mode=mode)
    plain, explanations = batcher.take(0.0), batcher.take(0.0)
    assert plain is not None and explanations is not None
    complete(batcher, plain, 5.0)
    complete(batcher, explanations, 6.0)
    admit(batcher, 4, now=6.0, mode=EXPLAIN)
    admit(batcher, 4, now=6.0, deadline=9.1, mode=EXPLAIN)  # Behind one second, of three to its deadline.


def test_admits_a_single_image_that_overtakes_a_large_request() -> None:
    batcher = make(batch=10, queue=200)
    run(batcher, 10, 0.0, 1.0)
    admit(batcher, 100, now=1.0)
    with pytest.raises(QueueFull):
        batcher.reserve(2, now=1.0, deadline=3.0)
    single = admit(batcher, 1, now=1.0, deadline=3.0)
    assert single in [part.request for part in batcher.take(1.0).slices]  # type: ignore[union-attr]


def test_requests_of_less_than_a_turn_count_as_the_images_they_have() -> None:
    batcher = make(batch=64)
    run(batcher, 64, 0.0, 6.4)
    for _ in range(6):  # 0.6 s of images, though a turn of each is 48, 6.4 s.
        admit(batcher, 1, now=6.4)
    admit(batcher, 1, now=6.4, deadline=9.4)


def test_large_request_ends_in_time_under_lasting_overload() -> None:
    """Three times more single images arrive than the device can do; each image takes 1/300 s."""
    batcher, now, arrived, large = make(64, 2048), 0.0, 0.0, None
    ended: list[QueuedRequest] = []
    while large not in ended:
        batch = batcher.take(now)
        seconds = (batch.size if batch else 8) / 300
        now, arrived = now + seconds, arrived + 900 * seconds
        assert now < 60, "the large request was never admitted or never ended"
        if batch is not None:
            complete(batcher, batch, now)
        sizes = [1] * int(arrived)
        arrived -= len(sizes)
        if large is None and now > 5:
            sizes.insert(0, 500)
        for size in sizes:
            try:
                request = admit(batcher, size, now, now + 10)
            except QueueFull:
                continue
            large = request if size == 500 else large
        batcher.expire(now)
        ended += batcher.collect()
    assert not [request for request in ended if request.error is not None]


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.01, 9.0)), max_size=12), st.integers(0, 100))
def test_times_are_those_of_batches_of_about_the_size(steps: list[tuple[int, float]], images: int) -> None:
    times, found = BatchTimes(8), dict[int, float]()
    for size, seconds in steps:
        times.add(size, seconds)
        kind = math.ceil(math.log2(size))
        found[kind] = 0.8 * found[kind] + 0.2 * seconds if kind in found else seconds

    def of(size: int) -> float:
        kind = math.ceil(math.log2(size))
        larger = min((k for k in found if k > kind), default=None)
        if kind in found:
            return found[kind]
        return found[max(found)] if larger is None else found[larger] * size / 2**larger

    sizes = [8] * (images // 8) + [images % 8] * (images % 8 > 0)
    assert times.total(images) == pytest.approx(sum(map(of, sizes)) if found else 0.0)


@given(st.floats(0.0, 9.0), st.floats(0.01, 1.0), st.sampled_from([1, 2, 4]))
def test_fixed_time_is_that_of_a_batch_without_images(fixed: float, each: float, small: int) -> None:
    times = BatchTimes(8)
    times.add(small, fixed + each * small)
    assert times.fixed == 0.0
    times.add(8, fixed + each * 8)
    assert times.fixed == pytest.approx(fixed, abs=1e-9)


def test_put_wakes_a_blocked_take_and_delivers_once() -> None:
    delivered: list[QueuedRequest] = []
    queue = RequestQueue(make(batch=4), delivered.extend)
    taken: list[DeviceBatch | None] = []

    def work() -> None:
        while not queue.stopped:
            batch = queue.take(block=True)
            if batch is not None:
                taken.append(batch)
                with queue as batcher:
                    complete(batcher, batch, time.monotonic())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10.0
    with queue as batcher:
        requests = [batcher.reserve(3, now=time.monotonic(), deadline=deadline) for _ in range(5)]
    queue.put([(request, NO_IMAGES) for request in requests])
    while len(delivered) < len(requests) and time.monotonic() < deadline:
        thread.join(0.001)
    queue.stop()
    thread.join(5.0)
    assert not thread.is_alive()
    assert sorted(map(id, delivered)) == sorted(map(id, requests))
    assert all(request.error is None for request in requests)


def test_a_second_batch_begins_only_with_a_turn_of_images() -> None:
    queue = RequestQueue(make(batch=16), lambda _: None)
    taken: list[DeviceBatch | None] = []

    def take() -> None:
        thread = threading.Thread(target=lambda: taken.append(queue.take(block=False)))
        thread.start()
        thread.join()

    def put(count: int) -> None:
        now = time.monotonic()
        with queue as batcher:
            request = batcher.reserve(count, now=now, deadline=now + 1e9)
        queue.put([(request, NO_IMAGES)])

    put(3)
    assert (first := queue.take(block=False)) is not None
    put(1)
    take()
    put(1)
    take()
    put(1)
    assert queue.take(block=False) is None  # The first one is done, the second one runs.
    assert [each and (each.size, each.is_alone) for each in (first, *taken)] == [(3, True), None, (2, False)]


def test_departure_wakes_a_take_that_waits_for_it() -> None:
    """A batch and a decoded image take a day each: a queued request waits for one in decoding, until that leaves."""
    batcher, day = make(batch=8, shares_cores=True), 86_400.0
    for count, now in ((1, -7 * day), (8, -4 * day)):
        request = batcher.reserve(count, now=now, deadline=1e9)
        batcher.put(request, NO_IMAGES, now=now + day)
        batch = batcher.take(now + day)
        assert batch is not None
        complete(batcher, batch, now + 2 * day + count)
    queue = RequestQueue(batcher, lambda _: None)
    now = time.monotonic()
    with queue:
        queued, decoding = (batcher.reserve(1, now=now, deadline=now + 1e9) for _ in range(2))
    taken: list[DeviceBatch | None] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take(block=True)), daemon=True)
    thread.start()
    queue.put([(queued, NO_IMAGES)])
    thread.join(0.05)
    assert not taken
    with queue:
        batcher.cancel(decoding)
    thread.join(30.0)
    assert [batch.slices[0].request for batch in taken if batch is not None] == [queued]
