from lmkit_testing import DialectConformance


class TestPoolingDialect(DialectConformance):
    plugin = "dialect:pooling"
