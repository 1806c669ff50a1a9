"""A weight [out, in] is stored as codes [out, in] int8 and scales [out] float32:

    w = scales * sign(codes) * ((1 + mu) ** (|codes| / 127) - 1) / mu

Small values, of which weights have most, lie closer together than large ones. There is no kernel for the format, so
that the weight is made once, as it is loaded: memory is not saved, the file is smaller. A kernel would be a plugin of
the kind `op` that names the format `mulaw`; the example `npu` has one for plain weights.
"""

from dataclasses import dataclass

from lmkit.api import ParamSpec, QuantFormat, QuantScheme, UnsupportedModel

LEVELS = 127


@dataclass(frozen=True)
class MuLaw(QuantScheme):
    """Contract: lmkit.api.QuantScheme. The configuration of a checkpoint, and which of its layers are stored so."""

    mu: float = 255.0
    skip: tuple = ()  # names of layers, in files, that were left as they are
    name: str = "mulaw"

    @classmethod
    def parse(cls, quantization_config):
        """Strict: what is not understood is refused, never skipped, for it might change the weights."""
        given = {key: value for key, value in quantization_config.items() if key != "quant_method"}
        for key, value in given.items():
            if key not in ("mu", "skip"):
                raise UnsupportedModel(key, value, "keys mu and skip")
        mu, skip = given.get("mu", 255.0), given.get("skip", [])
        if isinstance(mu, bool) or not isinstance(mu, (int, float)) or not 0 < mu <= 1e6:
            raise UnsupportedModel("mu", mu, "0 < mu <= 1000000")
        if not isinstance(skip, list) or not all(isinstance(name, str) for name in skip):
            raise UnsupportedModel("skip", skip, "a list of names of layers")
        return cls(float(mu), tuple(skip))

    def for_layer(self, layer):
        """None: this layer is stored plainly. `sources` are the names that the merged layers have in files."""
        return None if set(layer.sources) & set(self.skip) else MuLawRows(self.mu)


@dataclass(frozen=True)
class MuLawRows(QuantFormat):
    """Contract: lmkit.api.QuantFormat."""

    mu: float
    name: str = "mulaw"

    def params(self, layer, dtype):
        """`part_axis`: along it lie merged layers (q, k, v) one after another, and the parts of ranks."""
        rows = layer.total_out
        return {
            "codes": ParamSpec((rows, layer.in_features), "int8", part_axis=0),
            "scales": ParamSpec((rows,), "float32", part_axis=0),
        }

    def dequantize(self, params, dtype):
        """[out, in] in `dtype`: what every kernel for the format is measured against."""
        codes = params["codes"].to(params["scales"].dtype)
        size = ((1 + self.mu) ** (codes.abs() / LEVELS) - 1) / self.mu
        return (codes.sign() * size * params["scales"][:, None]).to(dtype)


def quantized(weight, mu):
    """The tensors of a weight [out, in]: the inverse of `dequantize`, but for rounding."""
    import torch

    weight = weight.float()
    scales = weight.abs().amax(1).clamp_min(1e-30)
    size = torch.log1p(mu * weight.abs() / scales[:, None]) / torch.log1p(torch.tensor(mu))
    return {"codes": (weight.sign() * size * LEVELS).round().to(torch.int8), "scales": scales}
