"""What to do about messages that do not say it themselves; each entry is one that is said."""

from __future__ import annotations

_CHECKPOINT = "download the checkpoint again, and give the folder of the model it belongs to"
_GGUF = "download the file again, and every part of a split one"
_REPORT = "it is a bug of hotexperts or of a policy of yours: please report it"
_WHOLE = "give the folder of a whole checkpoint: `config.json` and its .safetensors files"
_ROUTING = "record without what is refused, or another model"
_TRACE = "make the file anew as [the format](traces.md#files-that-read_trace-takes) has it"
_REQUEST = "send what [the server answers](serving.md#what-is-answered)"
_AREAS_OF_FILES = "run the command that wrote it again with `--json`, and give its output whole"

MODULES = {  # for what else a module says
    "fields": _AREAS_OF_FILES,
    "gguf_header": _GGUF,
    "integrations.transformers.checkpoint": _CHECKPOINT,
    "integrations.transformers.gguf_checkpoint": _GGUF,
    "integrations.transformers.gguf_config": _GGUF,
    "integrations.transformers.gguf_weights": _GGUF,
    "integrations.transformers.integers": _CHECKPOINT,
    "integrations.transformers.packed_weights": _CHECKPOINT,
    "integrations.transformers.plain_view": _CHECKPOINT,
    "integrations.transformers.recording": _ROUTING,
    "integrations.transformers.sources": _CHECKPOINT,
    "kernels.plan.layout": "delete the file of the state, or name another",
    "plan.config": _WHOLE,
    "plan.folder": _WHOLE,
    "plan.gguf": _GGUF,
    "plan.hub": (
        "check the name and the connection; a private or gated model needs its terms accepted and "
        "a token (`hf auth login`, or `HF_TOKEN`)"
    ),
    "plan.model": _WHOLE,
    "plan.source": "give a folder, a .gguf file, or a hub id such as `org/model`",
    "residency": "delete the file of the state, or name another",
    "serve.app": _REQUEST,
    "serve.refusal": _REQUEST,
    "serve.requests": _REQUEST,
    "simulate.arrays": _TRACE,
    "simulate.files": _TRACE,
    "simulate.lines": _TRACE,
    "simulate.trace": _TRACE,
}
MESSAGES = {
    "<class> does not say where the router logits of <name> are: <remedy>": (
        "record without logits or guesses, use prefetch='lift', or another model"
    ),
    "expert id <demand> in a layer of <num_experts> experts: ids go from 0 to <num_experts>": (
        "give ids of this layer"
    ),
    "the slots of experts and the experts of slots disagree": (
        "delete the file of the state, or name another"
    ),
    "cache_mode 'device' cannot work here, <cause>: <remedy>, or let the host manage the cache "
    "(cache_mode='host')": (
        "`auto` takes the host by itself: without a CUDA device or Triton, with a policy that has "
        "no kernel, or tensors that are no multiple of 4 bytes"
    ),
    "expert <expert>, tensor <name>: the file has <shape>, the model wants <shape>": _CHECKPOINT,
    "<path>: has no tensor <name>": _CHECKPOINT,
    "<num_experts> experts of <row_nbytes> bytes: there is nothing to store": _CHECKPOINT,
    "cannot write the cache's state to <path>: <strerror>": "make room, or name another file",
    "cannot read <path>: <strerror>": "name a file that can be read",
    "<path> has format <format>, and this version reads 2": (
        "delete it: the cache begins cold and writes a new one"
    ),
    "<name> is not installed: pip install -e '.[<extra>]' in the source folder": (
        "install the extra that it names"
    ),
    "<num_prompt_tokens> tokens of prompt and <new> new ones are more than the context of "
    "<context>: <remedies>": "lower `--max-new-tokens`, or raise `--context`",
    "<stopped>; what was recorded before is in <out>: <tokens> tokens, <layers> layers, <top_k> of "
    "<num_experts> experts<guessed>": "see the first half of the line; the file is whole",
    "expert_packing 'packed12' is unpacked by kernels, from page-locked memory: it does not work "
    "with expert_store <store>": "leave one of the two out",
    "expert_packing 'packed12' is unpacked by kernels, from page-locked memory: it does not work "
    "with cache_mode 'host'": "leave one of the two out",
    "tensor <name> has no expert dimension: a value shared by all experts stays with the model, it "
    "is not part of a row": "leave it out of the experts' tensors",
    "<wanted> loads no <model_type> model: from Python, load(auto_class=...) takes the class that "
    "does, such as AutoModelForImageTextToText": "give that class; the commands load causal LMs",
    "save_pretrained() of a model with an expert cache would write a checkpoint without its "
    "experts: copy the original instead": "copy the original",
    "push_to_hub() of a model with an expert cache would upload a checkpoint without its experts": (
        "upload the original"
    ),
    "<parent>: cannot be read: <error>": _CHECKPOINT,
    "device_map places the model on <str>: an expert cache needs one device, for example "
    'device_map="cuda"': "give one device",
    "state_dict does not work with an expert cache: experts are read from the checkpoint's files": (
        "write the weights as a checkpoint, and load that"
    ),
    "<path_or_id>: no such folder here, and the hub cannot be reached to look for a model of that "
    "name: <error>": "mend the path or the network; HF_HUB_OFFLINE=1 uses what was downloaded",
    "<path_or_id>: <number of names> <kind> tensors, first <names>: the checkpoint is incomplete, "
    "or of another model": _CHECKPOINT,
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
    "cannot load <kind> <name>: <class>: <error>; the known ones are <names>": (
        "mend `module:Class`, or take one of these"
    ),
    "there is no <path> here": _REQUEST,
    "policy <name> has no score that layers can share: in pool 'global' give one of ewma, llru, "
    "lru, or pool 'layer'": "take one of these",
    "<path>: nothing was recorded, so nothing is written": "give a prompt of at least one token",
    "arrays of shapes <given> a token, after tokens of <expected>": (
        "append the same arrays for each token"
    ),
}
