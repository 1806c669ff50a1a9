from lmkit_testing import PluginConformance


class TestPoolingDialect(PluginConformance):
    plugin = "dialect:pooling"
