"""What to write instead of a flag that other servers know and lmkit calls by another name, or does not need."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.contracts.errors import nearest

# flag of vLLM, SGLang or llama.cpp -> what to write here; -: nothing, and why
ELSEWHERE = {
    "--tensor-parallel-size": "--tp N",
    "--pipeline-parallel-size": "--pp N",
    "--data-parallel-size": "--dp N",
    "--enable-expert-parallel": "--ep N, the N of --tp",
    "--expert-parallel-size": "--ep N, which divides that of --tp",
    "--gpu-memory-utilization": "--kv-memory 90%, a share of the memory that is free, or --kv-memory 20GiB",
    "--mem-fraction-static": "--kv-memory 90%, a share of the memory that is free, or --kv-memory 20GiB",
    "--kv-cache-memory-bytes": "--kv-memory 20GiB",
    "--num-gpu-blocks-override": "--num-blocks N",
    "--max-num-seqs": "--max-rows N",
    "--max-running-requests": "--max-rows N",
    "--max-num-batched-tokens": "--max-step-tokens N",
    "--chunked-prefill-size": "--max-step-tokens N",
    "--max-model-len": "--max-length N",
    "--context-length": "--max-length N",
    "--ctx-size": "--max-length N",
    "--download-dir": "--cache-dir FOLDER",
    "--served-model-name": "--served-name NAME, once for each name",
    "--alias": "--served-name NAME",
    "--model-path": "lmkit serve FOLDER",
    "--tokenizer-path": "--tokenizer FOLDER",
    "--kv-cache-dtype": "--kv-dtype DTYPE",
    "--tool-call-parser": "--tool-parser NAME; without it the chat template decides",
    "--enable-auto-tool-choice": "-: tools are taken wherever a tool parser is chosen (--tool-parser)",
    "--enable-prefix-caching": "-: it is on; --no-prefix-cache turns it off",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--enable-chunked-prefill": "-: prompts are always computed in chunks (--max-step-tokens)",
    "--scheduling-policy": "--scheduler NAME; requests may carry a priority (--open-priority)",
    "--attention-backend": "--attention NAME",
    "--speculative-config": "-: nothing proposes tokens yet",
    "--proposer": "-: nothing proposes tokens yet",
    "--kv-transfer-config": "--kv-connector NAME, and its options as --kv-connector.NAME.OPTION",
    "--logits-processor": "-: nothing runs processors of logits yet",
    "--rope-scaling": "--hf-overrides '{\"rope_scaling\": {...}}'",
    "--trust-remote-code": "-: code of checkpoints is never run; a model plugin brings new architectures",
    "--enforce-eager": "-: what can be captured is captured, and the rest runs as it is",
    "--allowed-origins": "--cors-origin URL, once for each site",
    "--ssl-keyfile": "-: put a proxy that speaks TLS before the server",
    "--ssl-certfile": "-: put a proxy that speaks TLS before the server",
    "--disable-log-requests": "--log-level warning",
    "--disable-log-stats": "--log-level warning",
    "--uvicorn-log-level": "--log-level LEVEL",
    "--n-gpu-layers": "--platform NAME; a model runs on one platform as a whole",
}


def flag_hint(flag: str, known: Sequence[str]) -> str:
    """What to write instead of `flag`, an option that is not among `known`; empty if there is nothing like it."""
    spelled = "--" + flag.lstrip("-").replace("_", "-").lower()
    if spelled in known:
        return f"write {spelled}"
    if spelled in ELSEWHERE:
        text = ELSEWHERE[spelled]
        return f"leave it out{text[1:]}" if text.startswith("-:") else f"write {text}"
    like = nearest(spelled, [name for name in known if name.startswith("--")])
    return f"did you mean {like}?" if like else ""
