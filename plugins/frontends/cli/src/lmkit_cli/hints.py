"""What to write instead of a flag that other servers know and lmkit calls by another name, or does not need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lmkit.contracts.errors import nearest


class Hint(NamedTuple):
    """`text` is what to write here, or why there is nothing to write (`leave_out`)."""

    text: str
    example: str = ""  # arguments of `lmkit serve demo` that do it; the tests run them
    leave_out: bool = False


def _write(text: str, example: str) -> Hint:
    return Hint(text, example)


def _none(why: str, example: str = "") -> Hint:
    return Hint(why, example, leave_out=True)


_TP = _write("--tp N", "--tp 1")
_DP = _write("--dp N", "--dp 1")
_EP = _write("--ep N, which divides that of --tp", "--tp 1 --ep 1")
_MEMORY = _write("--kv-memory 90%, a share of the memory that is free, or --kv-memory 20GiB", "--kv-memory 50%")
_ROWS = _write("--max-rows N", "--max-rows 4")
_STEP = _write("--max-step-tokens N", "--max-step-tokens 128")
_LENGTH = _write("--max-length N", "--max-length 256")
_NAME = _write("--served-name NAME", "--served-name other")
_PREFIX = _write("--no-prefix-cache", "--no-prefix-cache")
_QUIET = _write("--log-level warning", "--log-level warning")
_SCHEDULER = _write(
    "--scheduler NAME; requests may carry a priority (--open-priority)", "--scheduler fair --open-priority"
)
_DRAFTS = _write(
    "--proposer NAME (ngram, draft_model, eagle, ...), and its options as --proposer.NAME.OPTION", "--proposer ngram"
)
_DRAFT_MODEL = _write(
    "--proposer draft_model --proposer.draft_model.model FOLDER",
    "--proposer draft_model --proposer.draft_model.model demo",
)
_PROCESSORS = _none(
    "requests name the logits processors that are installed (`lmkit plugins list`), "
    "and `lmkit plugins new logits_processor NAME` begins one"
)
_CERTIFICATE = _write("--tls-cert FILE, beside --tls-key FILE", "--tls-cert cert.pem --tls-key key.pem")
_KV_DTYPE = _write("--kv-dtype DTYPE", "--kv-dtype int8")
_EMBEDDING = _write("--task embed", "--task auto")
_TEMPLATE = _none("the checkpoint's chat template is used as it is, or that of --chat-template FILE")

# Flags of vLLM, SGLang, TGI and llama.cpp.
ELSEWHERE: Mapping[str, Hint] = {
    "--tensor-parallel-size": _TP,
    "--tp-size": _TP,
    "--num-shard": _TP,
    "--pipeline-parallel-size": _write("--pp N", "--pp 1"),
    "--pp-size": _write("--pp N", "--pp 1"),
    "--data-parallel-size": _DP,
    "--dp-size": _DP,
    "--enable-expert-parallel": _write("--ep N, the N of --tp", "--tp 1 --ep 1"),
    "--expert-parallel-size": _EP,
    "--ep-size": _EP,
    "--gpu-memory-utilization": _MEMORY,
    "--mem-fraction-static": _MEMORY,
    "--cuda-memory-fraction": _MEMORY,
    "--kv-cache-memory-bytes": _write("--kv-memory 20GiB", "--kv-memory 64MiB"),
    "--num-gpu-blocks-override": _write("--num-blocks N", "--num-blocks 256"),
    "--max-num-seqs": _ROWS,
    "--max-running-requests": _ROWS,
    "--parallel": _ROWS,
    "--max-num-batched-tokens": _STEP,
    "--chunked-prefill-size": _STEP,
    "--batch-size": _STEP,
    "--ubatch-size": _STEP,
    "--max-model-len": _LENGTH,
    "--context-length": _LENGTH,
    "--ctx-size": _LENGTH,
    "--max-total-tokens": _LENGTH,
    "--download-dir": _write("--cache-dir FOLDER", "--cache-dir folder"),
    "--served-model-name": _write("--served-name NAME, once for each name", "--served-name one --served-name two"),
    "--alias": _NAME,
    "--model-path": _write("lmkit serve FOLDER", "--model demo"),
    "--model-id": _write("lmkit serve FOLDER", "--model demo"),
    "--hf-repo": _write("lmkit serve ORG/NAME", "--model demo"),
    "--tokenizer-path": _write("--tokenizer FOLDER", ""),
    "--kv-cache-dtype": _KV_DTYPE,
    "--cache-type-k": _KV_DTYPE,
    "--cache-type-v": _KV_DTYPE,
    "--tool-call-parser": _write("--tool-parser NAME; without it the chat template decides", "--tool-parser hermes"),
    "--enable-auto-tool-choice": _none("tools are taken wherever a tool parser is chosen (--tool-parser)"),
    "--jinja": _TEMPLATE,
    "--chat-template-content-format": _TEMPLATE,
    "--enable-prefix-caching": _none("it is on; --no-prefix-cache turns it off", "--no-prefix-cache"),
    "--no-enable-prefix-caching": _PREFIX,
    "--disable-radix-cache": _PREFIX,
    "--enable-chunked-prefill": _none(
        "prompts are always computed in chunks (--max-step-tokens)", "--max-step-tokens 64"
    ),
    "--cont-batching": _none("requests are always batched as they come (--max-rows)", "--max-rows 4"),
    "--scheduling-policy": _SCHEDULER,
    "--schedule-policy": _SCHEDULER,
    "--attention-backend": _write("--attention NAME", "--attention torch"),
    "--flash-attn": _write("--attention NAME", "--attention torch"),
    "--speculative-config": _DRAFTS,
    "--speculative-algorithm": _DRAFTS,
    "--speculative-draft-model-path": _DRAFT_MODEL,
    "--model-draft": _DRAFT_MODEL,
    "--kv-transfer-config": _write(
        "--kv-connector NAME, and its options as --kv-connector.NAME.OPTION",
        "--kv-connector offload --kv-connector.offload.host 16",
    ),
    "--swap-space": _write("--kv-connector offload", "--kv-connector offload"),
    "--logits-processor": _PROCESSORS,
    "--logits-processors": _PROCESSORS,
    "--enable-custom-logit-processor": _PROCESSORS,
    "--rope-scaling": _write(
        """--hf-overrides '{"rope_scaling": {...}}'""",
        """--hf-overrides '{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}'""",
    ),
    "--trust-remote-code": _none("code of checkpoints is never run; a model plugin brings new architectures"),
    "--enforce-eager": _none("what can be captured is captured, and the rest runs as it is"),
    "--allowed-origins": _write("--cors-origin URL, once for each site", "--cors-origin https://a.example"),
    "--ssl-keyfile": _write("--tls-key FILE, beside --tls-cert FILE", "--tls-cert cert.pem --tls-key key.pem"),
    "--ssl-certfile": _CERTIFICATE,
    "--ssl-key-file": _CERTIFICATE,
    "--ssl-cert-file": _CERTIFICATE,
    "--ssl-ca-certs": _none("clients' certificates are not checked; put a proxy that does before the server"),
    "--disable-log-requests": _QUIET,
    "--disable-log-stats": _QUIET,
    "--uvicorn-log-level": _write("--log-level LEVEL", "--log-level warning"),
    "--n-gpu-layers": _write("--platform NAME; a model runs on one platform as a whole", "--platform cpu"),
    "--gpu-layers": _write("--platform NAME; a model runs on one platform as a whole", "--platform cpu"),
    "--is-embedding": _EMBEDDING,
    "--embedding": _EMBEDDING,
    "--lora": _write("--lora-modules NAME=FOLDER", ""),
    "--lora-paths": _write("--lora-modules NAME=FOLDER", ""),
}


def flag_hint(flag: str, known: Sequence[str]) -> str:
    """What to write instead of `flag`, an option that is not among `known`; empty if there is nothing like it."""
    spelled = "--" + flag.lstrip("-").replace("_", "-").lower()
    if spelled in known:
        return f"write {spelled}"
    if (hint := ELSEWHERE.get(spelled)) is not None:
        return f"leave it out: {hint.text}" if hint.leave_out else f"write {hint.text}"
    like = nearest(spelled, [name for name in known if name.startswith("--")])
    return f"did you mean {like}?" if like else ""
