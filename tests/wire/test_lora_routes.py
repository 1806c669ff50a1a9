"""Adapters over HTTP: by model name, loaded and unloaded while serving when that was allowed."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import httpx
import pytest
import torch
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_testing.serving import listening, real
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("base"), vocab_size=259)
    byte_tokenizer(path)
    return path


def adapter(folder: Path, seed: int) -> Path:
    """As peft writes it."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    name = "base_model.model.model.layers.{}.mlp.down_proj.lora_{}.weight"
    tensors = {
        name.format(i, side): torch.randn(shape, generator=generator)
        for i in range(2)
        for side, shape in (("A", (4, 80)), ("B", (48, 4)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


async def test_load_use_and_unload(base: Path, tmp_path: Path) -> None:
    first, second = (str(adapter(tmp_path / name, i)) for i, name in enumerate("ab"))
    options = {"served_name": "m", "dtype": "float32", "lora_modules": f"start={first}"}
    async with (
        real(str(base), enable_lora=True, **options) as llm,
        listening(llm) as url,
        httpx.AsyncClient() as client,
    ):

        async def complete(model: str) -> httpx.Response:
            body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            return await client.post(f"{url}/v1/completions", json=body)

        async def load(**body: object) -> httpx.Response:
            return await client.post(f"{url}/v1/load_lora_adapter", json=body)

        plain, started = (await complete("m")).json(), (await complete("start")).json()
        assert started["model"] == "start"
        assert plain["choices"][0]["token_ids"] != started["choices"][0]["token_ids"]
        assert (await complete("late")).status_code == 404
        assert (await load(lora_name="late", lora_path=first)).status_code == 200
        late = (await complete("late")).json()
        assert late["choices"][0]["token_ids"] == started["choices"][0]["token_ids"]
        models = (await client.get(f"{url}/v1/models")).json()["data"]
        assert [(m["id"], m.get("parent")) for m in models] == [("m", None), ("late", "m"), ("start", "m")]

        refused = await load(lora_name="late", lora_path=second)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
        assert (await load(lora_name="late", lora_path=second, load_inplace=True)).status_code == 200
        moved = (await complete("late")).json()
        assert moved["choices"][0]["token_ids"] != late["choices"][0]["token_ids"]
        missing = await load(lora_name="x", lora_path=str(tmp_path / "nowhere"))
        assert "adapter_config.json" in missing.json()["error"]["message"]
        assert (await load(lora_name="m", lora_path=first)).status_code == 400

        gone = await client.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "late"})
        assert gone.status_code == 200
        assert (await complete("late")).status_code == 404
        again = await client.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "late"})
        assert again.status_code == 400


async def test_the_routes_are_off_unless_asked_for(base: Path) -> None:
    async with real(str(base)) as llm, listening(llm) as url, httpx.AsyncClient() as client:
        body = {"lora_name": "a", "lora_path": "b"}
        assert (await client.post(f"{url}/v1/load_lora_adapter", json=body)).status_code == 404


async def test_no_request_about_adapters_ends_the_engine_or_stops_a_stream(base: Path, tmp_path: Path) -> None:
    """Names, paths and files of strangers: each answer is quick, 400, and tells nothing; the streams go on."""
    good = adapter(tmp_path / "good", 1)
    pipe, huge, odd = (adapter(tmp_path / name, 2) for name in ("pipe", "huge", "odd"))
    (pipe / "adapter_model.safetensors").unlink()
    os.mkfifo(pipe / "adapter_model.safetensors")
    os.truncate(huge / "adapter_model.safetensors", 8 << 30)
    config = json.loads((odd / "adapter_config.json").read_text())
    (odd / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 10**400, "modules_to_save": [["x"]]}))
    paths = ["a\0b", "\0", "~", "~nosuchuser", "~/x", str(tmp_path / "nowhere"), "/etc/passwd", "/dev", "x" * 4096,
             "\n", str(tmp_path), str(pipe), str(huge), str(odd)]  # fmt: skip
    names = ["a\0b", "~root", "../x", "a b", "a\n", "\u202e"]
    async with (
        real(str(base), enable_lora=True, served_name="m", dtype="float32") as llm,
        listening(llm) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):

        async def complete(num: int) -> list[int]:
            body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": num, "temperature": 0, "ignore_eos": True}
            answer = await client.post(f"{url}/v1/completions", json={**body, "return_token_ids": True})
            assert answer.status_code == 200
            return answer.json()["choices"][0]["token_ids"]

        async def load(name: str, path: str) -> httpx.Response:
            return await client.post(f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})

        alone = await complete(200)
        beside = asyncio.ensure_future(complete(200))
        answers = await asyncio.gather(*(load("x", path) for path in paths), *(load(name, str(good)) for name in names))
        answers += [await client.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name}) for name in names]
        assert {answer.status_code for answer in answers} == {400}
        told = {answer.json()["error"]["message"] for answer in answers[5:11]}
        assert len({text for text in told if "there is no adapter" in text}) == 1
        assert await beside == alone
        assert (await load("fine", str(good))).status_code == 200
        stats = await llm.client.stats()
        assert (stats.sched.num_running, stats.sched.num_free_blocks) == (0, stats.sched.num_blocks)
