"""The checkpoint format: experts in MXFP4, everything else as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lmkit.api import LinearSpec, QuantScheme
from lmkit_layouts import MxFp4, Settings
from lmkit_layouts.settings import Pattern, agreed, of_layer

EXPERTS = re.compile(r"[.]experts[.]")  # what the producer quantizes, whatever the list says


@dataclass(frozen=True, slots=True)
class MxFp4Scheme(QuantScheme):
    kept: tuple[Pattern, ...] = ()
    name: str = "mxfp4"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> MxFp4Scheme:
        given = Settings(quantization_config, ("quant_method",))
        scheme = cls(given.globs("modules_to_not_convert"))
        given.one_of("dequantize", (False,), False)
        given.done()
        return scheme

    def for_layer(self, layer: LinearSpec) -> MxFp4 | None:
        stored = agreed(layer, [self._stored(name) for name in of_layer(layer)], "modules_to_not_convert")
        return MxFp4(parts=layer.out_features, width=layer.in_features) if stored else None

    def _stored(self, name: str) -> bool:
        return EXPERTS.search(name) is not None and not any(pattern.matches(name) for pattern in self.kept)
