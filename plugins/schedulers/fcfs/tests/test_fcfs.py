from lmkit.api import SamplingParams
from lmkit.scheduling.request import Request
from lmkit_scheduler_fcfs.policy import FirstComeFirstServed, Priority
from lmkit_testing.scheduler import SchedulerConformance
from lmkit_testing.stepper import Stepper


class TestFcfs(SchedulerConformance):
    plugin = "scheduler:fcfs"


class TestPriority(SchedulerConformance):
    plugin = "scheduler:priority"


def make(order: int, arrival: float, priority: int = 0) -> Request:
    return Request(str(order), SamplingParams(), 1, [1], priority=priority, arrival=arrival, order=order)


def test_priority_before_arrival_before_order():
    urgent, early, late, later = make(4, 9.0, -1), make(3, 1.0), make(1, 2.0), make(2, 2.0)
    for key in (FirstComeFirstServed().admit_key, FirstComeFirstServed().victim_key):
        assert sorted([later, late, early, urgent], key=key) == [urgent, early, late, later]


def test_who_is_more_urgent_takes_a_row_at_once():
    """And who made room goes on where it was, with the same text."""
    alone = Stepper(max_rows=2)
    alone.add("b", [2] * 8, 20, priority=1, ignore_eos=True)
    alone.run()
    stepper = Stepper(policy=Priority(), max_rows=2)
    stepper.add("a", [1] * 8, 20, ignore_eos=True)
    stepper.add("b", [2] * 8, 20, priority=1, ignore_eos=True)
    for _ in range(5):
        stepper.step()
    stepper.add("c", [3] * 8, 4, ignore_eos=True)
    assert {row.id for row in stepper.step().rows} == {"a", "c"}
    stepper.add("d", [4] * 8, 4, ignore_eos=True)
    assert {row.id for row in stepper.step().rows} == {"a", "c"}  # nobody is less urgent than d
    stepper.run()
    assert stepper.tokens("b") == alone.tokens("b")
    assert stepper.scheduler.stats().num_preempted == 1
