"""The in-process executor is one executor among others."""

from lmkit_testing import ExecutorConformance


class TestUniproc(ExecutorConformance):
    plugin = "executor:uniproc"
