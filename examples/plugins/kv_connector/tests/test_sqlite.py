from lmkit_kv_connector_sqlite.connector import Blocks
from lmkit_testing import KVConnectorConformance


class TestSqlite(KVConnectorConformance):
    plugin = "kv_connector:sqlite"

    def options(self, tmp_path):
        return {"file": str(tmp_path / "blocks.sqlite")}


def test_the_file_is_found_again_and_bounded(tmp_path):
    keys = [(0, bytes([i]) * 32) for i in range(5)]
    first = Blocks(tmp_path / "blocks.sqlite", 300)
    for i, key in enumerate(keys):
        first.write(key, bytes([i]) * 100)
    first.close()
    again = Blocks(tmp_path / "blocks.sqlite", 300)
    assert list(again.read(keys)) == [None, None, *(bytes([i]) * 100 for i in (2, 3, 4))]
    assert [again.has(key) for key in keys] == [False, False, True, True, True]
    again.close()
