"""Zamba 2 against transformers."""

import pytest
from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader
from lmkit_model_zamba.arch import blocks, zamba2
from lmkit_testing import ModelConformance

MAMBA, HYBRID = "linear_attention", "hybrid"


class TestZamba2(ModelConformance):
    """`time_step_min`: the library takes it for the lower limit of prompts' time steps, but not of later tokens'.

    Smaller than other tiny models: this one multiplies roundings in transformers, too.
    """

    plugin = "model:Zamba2ForCausalLM"
    tolerance = 5e-4  # the library's float32 is off from its float64 by up to 1.5e-4
    values = {
        "hidden_size": 16, "num_hidden_layers": 3, "layers_block_type": [MAMBA, HYBRID, HYBRID],
        "num_key_value_heads": 4, "num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 6,
        "use_mem_rope": True, "n_mamba_heads": 4, "mamba_d_state": 8, "mamba_ngroups": 2, "chunk_size": 16,
        "time_step_min": 1e-9, "tie_word_embeddings": True,
    }  # fmt: skip
    variants = {
        "in turn": {
            "num_hidden_layers": 4, "layers_block_type": [MAMBA, HYBRID, HYBRID, HYBRID], "mamba_d_state": 4,
            "adapter_rank": 3, "mamba_expand": 4,
        },
        "one block": {"num_mem_blocks": 1, "use_shared_attention_adapter": False, "num_key_value_heads": 2},
        "biases": {"add_bias_linear": True, "use_mem_rope": False},
    }  # fmt: skip
    published = {"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}


GIVEN = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"use_long_context": True}, "use_long_context"),
        ({"n_mamba_heads": 5}, "n_mamba_heads"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
    ],
)
def test_values_that_are_refused(values: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        zamba2(ConfigReader({**GIVEN, **values}))
    assert failure.value.key == key


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"layers_block_type": [MAMBA]}, "layers_block_type"),
        ({"layers_block_type": [MAMBA, "shared"]}, "layers_block_type"),
        ({}, "layers_block_type"),
        (
            {"layers_block_type": [MAMBA, HYBRID], "use_shared_attention_adapter": True, "num_key_value_heads": 2},
            "num_key_value_heads",
        ),
    ],
)
def test_uses_that_are_refused(values: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        blocks(ConfigReader({**GIVEN, **values}))
    assert failure.value.key == key
