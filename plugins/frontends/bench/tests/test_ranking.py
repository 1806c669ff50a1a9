"""Rankings: what was measured decides what auto takes, on that device only; anything else in the file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit.api import BenchmarkCase, ConfigError, DeviceInfo
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.platforms import measured
from lmkit.plugins.resolve import resolve
from lmkit_bench.kernels import Measured
from lmkit_bench.ranking import ranking, save
from lmkit_testing.host import dist_dir
from lmkit_testing.world import World

__all__ = ["dist_dir"]
NAMES = {"attention": ["a", "b", "c"], "op": ["k", "l"]}
HERE = DeviceInfo(platform="plain", device_type="cpu")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMKIT_MEASURED", str(tmp_path / "folder" / "measured.json"))
    return tmp_path / "folder" / "measured.json"


def cases(**seconds: float) -> list[Measured]:
    made = [BenchmarkCase(name=name.replace("_", " "), run=int, bytes=1) for name in seconds]
    return [Measured(case, [s]) for case, s in zip(made, seconds.values(), strict=True)]


def test_the_quicker_comes_first_over_all_that_several_can_do() -> None:
    found = ranking(
        cases(
            attention_a_decode=4.0, attention_b_decode=1.0, attention_a_prefill=1.0, attention_b_prefill=2.0,
            attention_c_other=0.001,  # nobody else did that
            k_plain_1x2=2.0, l_plain_1x2=1.0, read_512_MiB=1.0,
        ),
        NAMES,
    )  # fmt: skip
    assert found == {"attention": ("b", "a"), "op": ("l", "k")}


def test_what_one_alone_can_do_says_nothing(file: Path) -> None:
    assert ranking(cases(attention_a_decode=4.0), NAMES) == {}
    with pytest.raises(ConfigError, match="nothing was measured"):
        save(HERE, {})
    assert not file.exists()


def test_auto_goes_by_what_was_saved(dist_dir: World) -> None:
    world = World(dist_dir.path).everything()
    features = "features=frozenset({'causal', 'sliding_window'})"
    world.attention("good", features)
    world.attention("quick", features + ", tier=Tier.REFERENCE")
    config = EngineConfig(model=ModelConfig(model="toy"))

    def taken() -> tuple[str, str]:
        choice = resolve(config, world.host())[0].choice("attention")
        return choice.name, choice.why

    assert taken() == ("good", "auto")
    save(DeviceInfo(platform="plain", device_type="cpu", name="another"), {"attention": ("quick", "good")})
    assert taken() == ("good", "auto")
    save(HERE, {"attention": ("quick", "good")})
    assert taken() == ("quick", "auto, by what was measured here")
    save(HERE, {"op": ("matmul",)})
    assert measured(HERE) == {"attention": ("quick", "good"), "op": ("matmul",)}
    save(HERE, {"attention": ("gone", "ref")})  # a plugin that is no longer there
    assert taken()[0] == "ref"


@pytest.mark.parametrize("text", ["", "[]", '{"x": 5}', '{"x": {"attention": "a"}}', "\0"])
def test_a_file_that_holds_something_else_is_refused(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    for use in (lambda: measured(HERE), lambda: save(HERE, {"op": ("k",)})):
        with pytest.raises(ConfigError, match=r"measured\.json holds no ranking"):
            use()
