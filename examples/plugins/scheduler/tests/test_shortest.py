from lmkit_testing import SchedulerConformance


class TestShortest(SchedulerConformance):
    plugin = "scheduler:shortest"
