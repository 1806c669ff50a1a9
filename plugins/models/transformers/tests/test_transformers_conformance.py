"""Architectures that have no family of their own, each proven like one that has."""

from typing import ClassVar

from lmkit_testing import ArchitectureConformance, heads

BERT = {"is_decoder": True, "sep_token_id": 2, "cls_token_id": 1}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


class Fallback(ArchitectureConformance):
    plugin = "model:transformers"


class Roberta(Fallback):
    """Positions begin behind that of padding, token 0."""

    first_position = 1
    values: ClassVar = BERT


class TestAriaText(Fallback):
    architecture = "AriaTextForCausalLM"
    values: ClassVar = {"moe_num_experts": 8, "moe_topk": 2}
    published: ClassVar = heads(2, 2, 128)


class TestAXK1(Fallback):
    architecture = "AXK1ForCausalLM"
    values: ClassVar = {
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    }  # fmt: skip
    published: ClassVar = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


class TestBeam(Fallback):
    architecture = "BeamForCausalLM"
    values: ClassVar = {"sliding_window": 9, **EXPERTS}
    published: ClassVar = heads(8, 2, 128)


class TestBert(Fallback):
    architecture = "BertLMHeadModel"
    values: ClassVar = BERT
    variants: ClassVar = {"tied": {"tie_word_embeddings": True}}
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}


class TestCamembert(Roberta):
    architecture = "CamembertForCausalLM"
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}


class TestCTRL(Fallback):
    architecture = "CTRLLMHeadModel"
    values: ClassVar = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 256, "dff": 80}
    published: ClassVar = {"n_embd": 160, "n_head": 2, "hidden_size": 160, "num_attention_heads": 2}


class TestData2VecText(Roberta):
    architecture = "Data2VecTextForCausalLM"
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}


class TestDiffLlama(Fallback):
    architecture = "DiffLlamaForCausalLM"
    variants: ClassVar = {"dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e3}}}
    published: ClassVar = heads(4, 2, 128)


class TestElectra(Fallback):
    architecture = "ElectraForCausalLM"
    values: ClassVar = {**BERT, "embedding_size": 24}
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}


class TestErnie(Fallback):
    architecture = "ErnieForCausalLM"
    values: ClassVar = BERT
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}


class TestKolibri1(Fallback):
    architecture = "Kolibri1ForCausalLM"
    values: ClassVar = {**EXPERTS, "n_routed_experts": 8, "sliding_window": 9}
    published: ClassVar = heads(8, 2, 128)


class TestLaguna(Fallback):
    architecture = "LagunaForCausalLM"
    values: ClassVar = {**EXPERTS, "sliding_window": 9}
    published: ClassVar = heads(8, 2, 128)


class TestMiMoV2Flash(Fallback):
    architecture = "MiMoV2FlashForCausalLM"
    values: ClassVar = {
        **EXPERTS, "n_routed_experts": 8, "num_local_experts": 8, "sliding_window": 9, "head_dim": 12, "v_head_dim": 8,
    }  # fmt: skip
    published: ClassVar = heads(8, 2, 192, v_head_dim=128)


class TestModernBertDecoder(Fallback):
    architecture = "ModernBertDecoderForCausalLM"
    values: ClassVar = {**BERT, "local_attention": 14}
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}


class TestMoshi(Fallback):
    architecture = "MoshiForCausalLM"
    values: ClassVar = {"head_dim": 12, "ffn_dim": 80}
    published: ClassVar = heads(2, 2, 128)


class TestRoberta(Roberta):
    architecture = "RobertaForCausalLM"
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}


class TestRobertaPreLayerNorm(Roberta):
    architecture = "RobertaPreLayerNormForCausalLM"
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}


class TestRoCBert(Fallback):
    architecture = "RoCBertForCausalLM"
    values: ClassVar = {**BERT, "pronunciation_vocab_size": 97, "shape_vocab_size": 97}
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}


class TestXLMRoberta(Roberta):
    architecture = "XLMRobertaForCausalLM"
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}


class TestXLMRobertaXL(Roberta):
    architecture = "XLMRobertaXLForCausalLM"
    published: ClassVar = {"hidden_size": 256, "num_attention_heads": 4}
