"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, Tier, hookimpl

from lmkit_model_bert.bert import BertArchitecture
from lmkit_model_bert.modern import ModernBertArchitecture
from lmkit_model_bert.rotary import RotaryArchitecture


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name=name,
            summary=summary,
            target=f"{kind.__module__}:{kind.__name__}",
            architectures=kind.names,
            features=features,
            supports_tp=False,
            supports_pp=False,
            tier=Tier.OPTIMIZED,
        )
        for name, summary, kind, features in (
            ("bert", "BERT, RoBERTa, XLM-RoBERTa and CamemBERT encoders; ColBERT", BertArchitecture, BOTH_WAYS),
            ("rotary_bert", "NomicBERT and GTE encoders", RotaryArchitecture, BOTH_WAYS),
            ("modernbert", "ModernBERT encoders", ModernBertArchitecture, BOTH_WAYS | {"bidirectional_window"}),
        )
    ]


BOTH_WAYS = frozenset({"bidirectional"})
