"""Credit: how many bytes may be in flight, with the time passed in by hand."""

from __future__ import annotations

import pytest

from p3.credit import Window

MESSAGE = 1000
A, B = b"a", b"b"


def window(fixed=0, peers=(A,)):
    made = Window(MESSAGE, fixed)
    for peer in peers:
        made.add_peer(peer)
    return made


def stream(made, rate_bytes_s, delay_s, seconds, start=0.0, peer=A, nbytes=MESSAGE):
    """Keep the window full over a link of that rate and delay; return when it ended."""
    arrivals = []  # when each message in flight will be credited
    now = free = start
    while now < start + seconds:
        while made.has_room(nbytes):
            made.sent(peer, nbytes, now)
            free = max(free, now) + nbytes / rate_bytes_s
            arrivals.append(free + delay_s)
        now = arrivals.pop(0)
        made.credited(peer, nbytes, now)
    for now in arrivals:
        made.credited(peer, nbytes, now)
    return now


def test_a_fixed_window_is_kept():
    made = window(fixed=2500)
    made.sent(A, MESSAGE, 0.0)
    assert made.has_room(1500)
    made.sent(A, MESSAGE, 0.0)
    assert not made.has_room(501)
    assert made.has_room(500)
    made.credited(A, MESSAGE, 1.0)
    assert made.has_room(MESSAGE)
    assert made.size_bytes == 2500


def test_who_has_nothing_in_flight_may_send_whatever_its_size():
    made = window(fixed=10)
    assert made.has_room(10**9)
    made.sent(A, 10**9, 0.0)
    assert not made.has_room(1)


def test_the_window_is_never_less_than_a_message_a_link():
    made = window(peers=[b"%d" % n for n in range(5)])
    assert made.size_bytes == 5 * MESSAGE
    stream(made, rate_bytes_s=1e3, delay_s=0.0, seconds=20, peer=b"0")
    assert made.size_bytes >= 5 * MESSAGE


@pytest.mark.parametrize(("rate", "delay"), [(1e6, 0.05), (1e6, 0.01), (1e5, 0.2)])
def test_the_window_grows_until_it_fills_a_path_of_any_delay(rate, delay):
    made = window()
    stream(made, rate, delay, seconds=200 * delay)
    assert made.size_bytes >= rate * delay
    assert made.size_bytes <= 4 * (rate * delay + MESSAGE)


def test_a_path_that_is_never_idle_does_not_take_its_own_queue_for_delay():
    made = window()
    stream(made, 3e5, 0.05, seconds=60)
    assert 3e5 * 0.05 <= made.size_bytes <= 4 * (3e5 * 0.05 + MESSAGE)


def test_messages_larger_than_usual_do_not_keep_the_window_small():
    made = window()
    stream(made, 3e5, 0.05, seconds=60, nbytes=3 * MESSAGE)
    assert 3e5 * 0.05 <= made.size_bytes <= 4 * (3e5 * 0.05 + 3 * MESSAGE)


def test_measuring_the_delay_anew_costs_little_of_the_rate():
    made, seconds = window(), 60
    sent = 0

    class Counted:
        """Counts what ``stream`` sends."""

        def __getattr__(self, name):
            return getattr(made, name)

        def sent(self, peer, nbytes, now):
            nonlocal sent
            sent += nbytes
            made.sent(peer, nbytes, now)

    stream(Counted(), 3e5, 0.05, seconds)
    assert sent >= 0.97 * 3e5 * seconds


def test_the_window_shrinks_when_the_path_has_become_slower():
    made = window()
    now = stream(made, 3e6, 0.01, seconds=2)
    before = made.size_bytes
    stream(made, 1e5, 0.01, seconds=20, start=now)
    assert made.size_bytes < before / 5


def test_credit_comes_for_several_messages_at_once():
    made = window(fixed=10_000)
    for nbytes in (300, 700, 500):
        made.sent(A, nbytes, 0.0)
    made.credited(A, 1000, 1.0)
    assert made.in_flight == 500
    made.credited(A, 500, 1.0)
    assert made.in_flight == 0


def test_of_several_links_none_takes_the_whole_window():
    made = window(fixed=4 * MESSAGE, peers=(A, B))
    made.sent(A, MESSAGE, 0.0)
    assert made.link_has_room(A, MESSAGE)
    made.sent(A, MESSAGE, 0.0)
    assert not made.link_has_room(A, MESSAGE)
    assert made.link_has_room(B, MESSAGE)


def test_a_single_link_may_take_all_of_it():
    made = window(fixed=4 * MESSAGE)
    made.sent(A, 3 * MESSAGE, 0.0)
    assert made.link_has_room(A, MESSAGE)
    assert made.has_room(MESSAGE)


def test_an_empty_link_takes_what_is_larger_than_its_share():
    made = window(fixed=4 * MESSAGE, peers=(A, B))
    assert made.link_has_room(A, 100 * MESSAGE)


@pytest.mark.parametrize("nbytes", [1001, 2**64 - 1])
def test_credit_for_what_was_never_sent_is_refused_and_changes_nothing(nbytes):
    made = window(fixed=5000)
    made.sent(A, 1000, 0.0)
    with pytest.raises(ValueError, match="credits"):
        made.credited(A, nbytes, 1.0)
    assert made.in_flight == 1000


def test_credit_in_the_instant_of_sending_divides_by_nothing():
    made = window()
    made.sent(A, MESSAGE, 5.0)
    made.credited(A, MESSAGE, 5.0)
    assert made.size_bytes >= MESSAGE
