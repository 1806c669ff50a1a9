from lmkit.api import SamplingParams
from lmkit.scheduling.request import Request
from lmkit_scheduler_fcfs.policy import FirstComeFirstServed
from lmkit_testing.scheduler import SchedulerConformance


class TestFcfs(SchedulerConformance):
    plugin = "scheduler:fcfs"


def make(order: int, arrival: float, priority: int = 0) -> Request:
    return Request(str(order), SamplingParams(), 1, [1], priority=priority, arrival=arrival, order=order)


def test_priority_before_arrival_before_order():
    urgent, early, late, later = make(4, 9.0, -1), make(3, 1.0), make(1, 2.0), make(2, 2.0)
    for key in (FirstComeFirstServed().admit_key, FirstComeFirstServed().victim_key):
        assert sorted([later, late, early, urgent], key=key) == [urgent, early, late, later]
