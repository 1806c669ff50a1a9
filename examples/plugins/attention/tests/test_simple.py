from lmkit_testing import AttentionConformance


class TestSimple(AttentionConformance):
    plugin = "attention:simple"
