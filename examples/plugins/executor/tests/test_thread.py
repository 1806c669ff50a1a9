from lmkit_testing import ExecutorConformance


class TestThread(ExecutorConformance):
    plugin = "executor:thread"
