"""What to do about messages that do not say it themselves; each entry is one that is said."""

from __future__ import annotations

_CHECKPOINT = "download the checkpoint again, and give the folder of the model it belongs to"
_GGUF = "download the file again, and every part of a split one"
_REPORT = "it is a bug of hotexperts or of a policy of yours: please report it"
_STATE = "delete the file of the state, or name another"  # as the line around these says

MODULES = {  # for what else a module says
    "gguf_header": _GGUF,
    "integrations.transformers.checkpoint": _CHECKPOINT,
    "integrations.transformers.gguf_checkpoint": _GGUF,
    "integrations.transformers.gguf_config": _GGUF,
    "integrations.transformers.gguf_weights": _GGUF,
    "integrations.transformers.integers": _CHECKPOINT,
    "integrations.transformers.packed_weights": _CHECKPOINT,
    "integrations.transformers.plain_view": _CHECKPOINT,
    "integrations.transformers.sources": _CHECKPOINT,
    "kernels.plan.layout": _STATE,
    "residency": _STATE,
    "serve.refusal": "send what [the server answers](serving.md#what-is-answered)",
}
MESSAGES = {
    "<class> does not say where the router logits of <name> are: <remedy>": (
        "record without logits or guesses, use prefetch='lift', or another model"
    ),
    "the slots of experts and the experts of slots disagree": _STATE,
    "cache_mode 'device' cannot work here, <cause>: <remedy>, or let the host manage the cache "
    "(cache_mode='host')": (
        "`auto` takes the host by itself: without a CUDA device or Triton, with a policy that has "
        "no kernel, or tensors that are no multiple of 4 bytes"
    ),
    "<num_prompt_tokens> tokens of prompt and <new> new ones are more than the context of "
    "<context>: <remedies>": "lower `--max-new-tokens`, or raise `--context`",
    "<stopped>; what was recorded before is in <out>: <tokens> tokens, <layers> layers, <top_k> of "
    "<num_experts> experts<guessed>": "see the first half of the line; the file is whole",
    "--moe-expert-cache-policy: <error>": (
        "the rest of the line says what is wrong with that option"
    ),
    "--moe-expert-cache-size: <error>": (
        "the rest of the line says what is wrong with that option"
    ),
    "--moe-expert-cache-options: packing: <error>": (
        "the rest of the line says what is wrong with that option"
    ),
    "--moe-expert-cache-options: prefetch: <error>": (
        "the rest of the line says what is wrong with that option"
    ),
    "--moe-expert-cache-options is no JSON (<error>): <given>": (
        "quote it for the shell: `'{\"prefill_tokens\": 64}'`"
    ),
    "--enable-sleep-mode does not work with --moe-expert-cache-size: waking up would leave the "
    "slots without their experts": "leave it off",
    "--moe-expert-cache-options: state is <state>, in a folder that is not there": (
        "make the folder"
    ),
    "--moe-expert-cache-options: trace: <error>": "name a file in a folder that can be written",
    "<num_programs> programs: 'adv' needs <NUM_PLAYED>, one for each shadow": _REPORT,
}
