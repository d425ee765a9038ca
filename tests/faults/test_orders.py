"""Orders: each does what it says, to the thread that meets it, and says that it does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from sluice_faults import Action, Order, OrderError, arm, place, reached, withdraw

POINT = "leader.plan"


@pytest.fixture
def faults(tmp_path):
    return arm(str(tmp_path))


def eventually(check):
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_without_an_order_nothing_happens(faults, tmp_path):
    faults.reach(POINT)
    assert faults.change(POINT, b"abc") == b"abc"
    assert not faults.holds(POINT)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_refused_by_name():
    with pytest.raises(OrderError, match="/nowhere"):
        arm("/nowhere")


def test_the_word_says_which_thread_reached_it(faults, tmp_path):
    place(tmp_path, POINT, Order(Action.PASS))
    assert reached(tmp_path, POINT) is None
    faults.reach(POINT)
    assert reached(tmp_path, POINT)["tid"] == threading.get_native_id()
    place(tmp_path, POINT, Order(Action.PASS))
    assert reached(tmp_path, POINT) is None


@pytest.mark.parametrize("action", [Action.BLOCK, Action.SPIN])
def test_it_lasts_until_the_order_goes(faults, tmp_path, action):
    place(tmp_path, POINT, Order(action))
    thread = threading.Thread(target=faults.reach, args=(POINT,))
    thread.start()
    eventually(lambda: reached(tmp_path, POINT))
    thread.join(0.1)
    assert thread.is_alive()
    withdraw(tmp_path, POINT)
    thread.join(20)
    assert not thread.is_alive()


def test_another_order_in_its_place_is_another_order(faults, tmp_path):
    place(tmp_path, POINT, Order(Action.BLOCK))
    thread = threading.Thread(target=faults.reach, args=(POINT,))
    thread.start()
    eventually(lambda: reached(tmp_path, POINT))
    place(tmp_path, POINT, Order(Action.RAISE))
    thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError):
        faults.reach(POINT)


def test_sleep_takes_its_seconds(faults, tmp_path):
    place(tmp_path, POINT, Order(Action.SLEEP, seconds=0.2))
    began = time.monotonic()
    faults.reach(POINT)
    assert time.monotonic() - began >= 0.2


def test_raise_is_the_named_error_with_its_number(faults, tmp_path):
    place(tmp_path, POINT, Order(Action.RAISE, error="OSError", errno=28))
    with pytest.raises(OSError, match="No space left"):
        faults.reach(POINT)
    place(tmp_path, POINT, Order(Action.RAISE, error="ValueError", text="so"))
    with pytest.raises(ValueError, match="so"):
        faults.reach(POINT)


def test_end_passes_whoever_catches_exceptions_only(faults, tmp_path):
    place(tmp_path, POINT, Order(Action.END))
    with pytest.raises(SystemExit):
        faults.reach(POINT)


def test_after_and_times_count_from_the_order_on(faults, tmp_path):
    place(tmp_path, POINT, Order(Action.RAISE, after=2, times=1))
    faults.reach(POINT)
    faults.reach(POINT)
    with pytest.raises(RuntimeError):
        faults.reach(POINT)
    faults.reach(POINT)


def test_an_order_for_another_process_is_left_alone(faults, tmp_path):
    place(tmp_path, POINT, Order(Action.RAISE, pid=1))
    faults.reach(POINT)
    assert reached(tmp_path, POINT) is None


def test_of_many_that_come_by_the_first_one_alone_is_held_and_always_the_same(faults, tmp_path):
    place(tmp_path, POINT, Order(Action.HOLD))
    assert [faults.holds_one(POINT, which) for which in (4, 7, 4, 9)] == [True, False, True, False]
    place(tmp_path, POINT, Order(Action.PASS))
    assert not faults.holds_one(POINT, 4)
    assert reached(tmp_path, POINT) is not None
    withdraw(tmp_path, POINT)
    assert not faults.holds_one(POINT, 4)


def test_hold_holds_and_only_where_that_is_asked(faults, tmp_path):
    place(tmp_path, POINT, Order(Action.HOLD))
    faults.reach(POINT)
    assert faults.change(POINT, b"x") == b"x"
    assert faults.holds(POINT)
    withdraw(tmp_path, POINT)
    assert not faults.holds(POINT)


def test_changes_of_what_goes_by(faults, tmp_path):
    assert faults.change(POINT, b"one") == b"one"
    place(tmp_path, POINT, Order(Action.FLIP, times=1))
    assert faults.change(POINT, b"two") == b"twn"
    assert faults.change(POINT, b"two") == b"two"
    place(tmp_path, POINT, Order(Action.FLIP, offset=0))
    assert faults.change(POINT, b"two") == b"uwo"
    place(tmp_path, POINT, Order(Action.REPEAT))
    assert faults.change(POINT, b"three") == b"two"
    place(tmp_path, POINT, Order(Action.DROP))
    assert faults.change(POINT, b"four") == b""


def test_what_is_no_order_is_said_and_left_alone(faults, tmp_path, capfd):
    for text in ("nonsense", '{"action": "dance"}', '{"action": "pass", "speed": 1}', "[]"):
        (tmp_path / f"{POINT}.json").write_text(text)
        faults.reach(POINT)
        assert POINT in capfd.readouterr().err
    assert reached(tmp_path, POINT) is None


SPIN_GIL = """
import sys, threading, time
from sluice_faults import arm
faults, ticks = arm(sys.argv[1]), []
def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
time.sleep(0.05)
faults.reach("leader.plan")
time.sleep(0.05)
gap = max(b - a for a, b in zip(ticks, ticks[1:]))
sys.exit(0 if gap > 0.15 else f"the longest pause of another thread was {gap}")
"""

EXHAUST = """
import sys
from sluice_faults import arm
try:
    arm(sys.argv[1]).reach("leader.plan")
except MemoryError:
    try:
        bytearray(256 << 20)
    except MemoryError:
        sys.exit(0)
sys.exit("there was memory")
"""


@pytest.mark.parametrize(
    ("order", "code"),
    [(Order(Action.SPIN_GIL, seconds=0.5), SPIN_GIL), (Order(Action.EXHAUST), EXHAUST)],
    ids=["spin-gil", "exhaust"],
)
def test_what_only_a_process_of_its_own_survives(tmp_path, order, code):
    place(tmp_path, POINT, order)
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
