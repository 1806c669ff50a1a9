from lmkit_testing import PluginConformance


class TestOpenAI(PluginConformance):
    plugin = "dialect:openai"
