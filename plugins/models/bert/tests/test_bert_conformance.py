"""Encoders against transformers."""

import pytest
from lmkit.api import UnsupportedModel
from lmkit_model_bert.bert import BertArchitecture
from lmkit_model_bert.modern import ModernBertArchitecture
from lmkit_model_bert.rotary import RotaryArchitecture
from lmkit_testing import PoolingConformance

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
MODERN = {"local_attention": 12, **SPECIAL}


class TestBert(PoolingConformance):
    plugin, config, model = "model:BertModel", "BertConfig", "BertModel"
    variants = {"tanh gelu": {"hidden_act": "gelu_new"}, "one type": {"type_vocab_size": 1}}

    def test_number_of_parameters_is_exact(self, loaded):
        assert loaded.weight_bytes == 4 * loaded.info.num_parameters  # without the pooler, which embeddings do not use


class TestBertClasses(PoolingConformance):
    plugin, config, model = "model:BertForSequenceClassification", "BertConfig", "BertForSequenceClassification"
    variants = {"one": {"num_labels": 1}}


class TestBertTokens(PoolingConformance):
    plugin, config, model = "model:BertForTokenClassification", "BertConfig", "BertForTokenClassification"
    values = {"num_labels": 5}


class TestRoberta(PoolingConformance):
    plugin, config, model = "model:RobertaModel", "RobertaConfig", "RobertaModel"
    values = {"pad_token_id": 1, "type_vocab_size": 1}
    variants = {"other padding": {"pad_token_id": 0}}


class TestXlmRobertaClasses(PoolingConformance):
    plugin, config = "model:XLMRobertaForSequenceClassification", "XLMRobertaConfig"
    model = "XLMRobertaForSequenceClassification"
    values = {"pad_token_id": 1, "num_labels": 1}


class TestCamembertTokens(PoolingConformance):
    plugin, config = "model:CamembertForTokenClassification", "CamembertConfig"
    model = "CamembertForTokenClassification"
    values = {"pad_token_id": 1, "num_labels": 3}


class TestNomic(PoolingConformance):
    plugin, config, model = "model:NomicBertModel", "NomicBertConfig", "NomicBertModel"


class TestNomicClasses(PoolingConformance):
    plugin, config = "model:NomicBertForSequenceClassification", "NomicBertConfig"
    model = "NomicBertForSequenceClassification"


class TestGte(PoolingConformance):
    plugin, config, model = "model:GteModel", "GteConfig", "GteModel"
    variants = {
        "no types": {"type_vocab_size": 0},
        "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    }


class TestGteClasses(PoolingConformance):
    plugin, config, model = "model:GteForSequenceClassification", "GteConfig", "GteForSequenceClassification"


class TestModernBert(PoolingConformance):
    plugin, config, model = "model:ModernBertModel", "ModernBertConfig", "ModernBertModel"
    values = MODERN
    variants = {
        "biases": {"attention_bias": True, "mlp_bias": True, "norm_bias": True},
        "all near": {"layer_types": ["sliding_attention"] * 3},
        "all far": {"global_attn_every_n_layers": 1},
    }


class TestModernBertClasses(PoolingConformance):
    plugin, config = "model:ModernBertForSequenceClassification", "ModernBertConfig"
    model = "ModernBertForSequenceClassification"
    values = MODERN
    variants = {"bias": {"classifier_bias": True, "classifier_activation": "relu"}}


class TestModernBertTokens(PoolingConformance):
    plugin, config = "model:ModernBertForTokenClassification", "ModernBertConfig"
    model = "ModernBertForTokenClassification"
    values = {**MODERN, "num_labels": 4}


BERT = {
    "architectures": ["BertModel"], "vocab_size": 30, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        (BertArchitecture, {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (BertArchitecture, {"hidden_act": "mish"}, "hidden_act"),
        (BertArchitecture, {"is_decoder": True}, "is_decoder"),
        (BertArchitecture, {"num_attention_heads": 3}, "num_attention_heads"),
        (RotaryArchitecture, {"architectures": ["NomicBertModel"], "n_embd": 8, "prenorm": True}, "prenorm"),
        (ModernBertArchitecture, {"architectures": ["ModernBertModel"], "layer_types": ["strange"]}, "layer_types"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(kind, changes, key):
    with pytest.raises(UnsupportedModel) as failure:
        kind().describe({**BERT, **changes})
    assert key in str(failure.value)


def test_names_of_nomics_own_files():
    """Fused q, k, v and its own words for sizes."""
    own = {
        "architectures": ["NomicBertModel"], "vocab_size": 30, "n_embd": 8, "n_inner": 12, "n_layer": 1, "n_head": 2,
        "n_positions": 64, "activation_function": "swiglu", "rotary_emb_base": 1000, "layer_norm_epsilon": 1e-12,
    }  # fmt: skip
    info = RotaryArchitecture().describe(own)
    assert (info.hidden_size, info.max_length, info.linears[0].out_features) == (8, 64, (24,))
    sources = {rule.source for rule in RotaryArchitecture().weights(info)}
    assert {"encoder.layers.{i}.attn.Wqkv.{p}", "encoder.layers.{i}.mlp.fc12.{p}"} <= sources
