"""Rules that need the installed sglang, the device or the environment; and the choice behind weights.transport =
"auto".
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from harness.config.facts import Device, EngineArgument, Facts, SGLangFacts
from harness.config.rules import BrokenRule
from harness.config.schema import TINY_MODELS, Config, TransportName

KINDS = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "None": ""}
"""The types that are checked; arguments of other types are left to SGLang."""
PINNED = "it keeps tensors in pinned memory, for which torch needs an accelerator"
CPU_ARGUMENTS = {
    "enable_lora": ("", PINNED),
    "lora_paths": ("", PINNED),
    "enable_hierarchical_cache": ("", PINNED),
    "kv_cache_dtype": (
        "fp8",
        "SGLang's FP8 KV cache needs CPU kernels that the import-only stand-in for sgl_kernel does not have",
    ),
}
"""Engine argument -> the beginning of values that CPU mode cannot serve, and why."""
OTHER_NORMS = frozenset(("enable_deterministic_inference", "rl_on_policy_target"))
"""Engine arguments that make SGLang compute RMSNorm with other kernels; nobody has run them in float32 here."""
OF_MANY_RANKS = frozenset(
    (
        *("enable_dp_attention", "dp_size", "attn_dp_size", "enable_dp_lm_head", "attn_cp_size"),
        *("ep_size", "expert_parallel_size", "moe_a2a_backend", "moe_dp_size", "moe_dense_tp_size"),
    )
)
"""Engine arguments that only an engine of several ranks takes. attn_dp_size is what releases from 0.5.22 on have for
the first two."""


def engine_rules(config: Config, facts: Facts, device: Device | None) -> Iterator[BrokenRule]:
    """Yield what is wrong with the engine's arguments, with the device, and with the way the weights travel on it."""
    if facts.sglang:
        for name, value in config.engine.args.items():
            if problem := argument_problem(facts.sglang, name, value):
                yield BrokenRule(f"engine.args.{name}", problem)
        yield from _routing(config, facts.sglang, device)
    if device == "cpu":
        yield from _on_cpu(config)
    if device == "cuda":
        yield from _on_cuda(config, expandable_segments(facts.environment or {}))
    if config.engine.device == "cuda" and facts.why_no_gpu:
        yield BrokenRule("engine.device", f'{facts.why_no_gpu}; use "cpu"')


def generation_rules(config: Config, facts: Facts, device: Device | None) -> Iterator[BrokenRule]:
    """Refuse float32 for an engine that generates on a GPU, where SGLang's kernel for RMSNorm takes 16 bits alone.

    Not judged: an engine that uses another norm, as its batch-invariant ones do, and a plan that only assumes a GPU.
    """
    is_there = config.engine.device == "cuda" or facts.environment is not None
    has_norm = facts.model and (config.model.name in TINY_MODELS or "rms_norm_eps" in facts.model)
    is_other = config.rollout.load or OTHER_NORMS & config.engine.args.keys()
    if device == "cuda" and is_there and has_norm and not is_other and config.model.dtype == "float32":
        why = "SGLang's kernels on a GPU do not take it (rmsnorm failed to dispatch data type Float)"
        yield BrokenRule("model.dtype", f"{why}; use --model.dtype bfloat16, or --engine.device cpu")


def code_rules(config: Config, facts: Facts) -> Iterator[BrokenRule]:
    """Refuse Python code of a model that SGLang would run unasked, unless the user trusts it.

    A model that transformers does not know is left to model_rules: the trainer runs no code of a model, trusted or not.
    """
    kind = (facts.model or {}).get("model_type")
    for key, why in facts.code.items() if not config.engine.args.get("trust_remote_code") else ():
        if key == "model.name" and facts.model_types is not None and kind not in facts.model_types:
            continue
        trust = "if you trust whoever wrote it, set engine.args.trust_remote_code = true; if not, use another model"
        yield BrokenRule(key, f"{why}; {trust}")


def choose_transport(config: Config) -> tuple[TransportName, str]:
    """Return the transport that weights.transport means, and why, as part of a sentence."""
    asked = config.weights.transport
    if asked != "auto":
        return asked, "set in the config"
    if not config.parallel.colocate:
        return "distributed", "auto: parallel.colocate is false"
    if config.parallel.pp > 1:
        return "bucket", "auto: SGLang's own load_weights, called in each pipeline stage"
    return "bucket", "auto: SGLang's own update call"


def argument_problem(sglang: SGLangFacts, name: str, value: Any) -> str:
    """Return why sglang.Engine refuses this argument with this value, or "" if it seems fine."""
    if name not in sglang.arguments:
        return unknown_argument(name, sglang.arguments, sglang.version)
    argument = sglang.arguments[name]
    if not _fits(argument, value):
        kinds = " or ".join(KINDS[kind] for kind in argument.kinds if kind != "None")
        return f"sglang {sglang.version} takes {kinds} there"
    # Plugins add choices, so a value is refused only if it looks like a misspelt choice.
    near = difflib.get_close_matches(value, argument.choices, n=1, cutoff=0.7) if isinstance(value, str) else []
    return f"sglang {sglang.version} has no such choice; the nearest is {near[0]}" if near and value != near[0] else ""


def unknown_argument(name: str, known: Collection[str], version: str) -> str:
    """Return the sentence about an engine argument that this sglang does not know."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return f"sglang {version} has no such engine argument" + (f"; the nearest it has is {near[0]}" if near else "")


def expandable_segments(environment: Mapping[str, str]) -> str:
    """Return the setting, NAME=VALUE, that makes torch allocate memory that CUDA IPC cannot share, or ""."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environment.get(name, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            return f"{name}={value}"
    return ""


def _fits(argument: EngineArgument, value: Any) -> bool:
    if not set(argument.kinds) <= KINDS.keys():
        return True
    kind = type(value).__name__
    return value is None or kind in argument.kinds or (kind == "int" and "float" in argument.kinds)


def _routing(config: Config, sglang: SGLangFacts, device: Device | None) -> Iterator[BrokenRule]:
    if config.rollout.routing == "off" or config.rollout.load:
        return
    if not sglang.returns_routing:
        why = f"sglang {sglang.version} cannot say which experts a token took (it lacks return_routed_experts)"
        yield BrokenRule("rollout.routing", f'{why}; use "off", or another release', unsupported=True)
    elif device == "cpu" and not sglang.returns_routing_on_cpu:
        why = f"sglang {sglang.version} keeps routed experts in pinned memory, for which its CPU mode has no stand-in"
        yield BrokenRule("rollout.routing", f'{why}; use "off", a GPU, or another release', unsupported=True)


def _on_cpu(config: Config) -> Iterator[BrokenRule]:
    if not config.parallel.colocate:
        yield BrokenRule("parallel.colocate", "on the CPU there are no GPUs to separate; use true")
    for name, (beginning, reason) in CPU_ARGUMENTS.items():
        value = config.engine.args.get(name)
        if value and str(value).startswith(beginning):
            why = f"SGLang's CPU mode cannot serve it: {reason}; use a GPU, or remove it"
            yield BrokenRule(f"engine.args.{name}", why, unsupported=True)


def _on_cuda(config: Config, expandable: str) -> Iterator[BrokenRule]:
    transport, colocate = config.weights.transport, config.parallel.colocate
    if transport == "distributed" and colocate:
        why = "NCCL refuses two ranks on one GPU"
        yield BrokenRule("weights.transport", f"{why}; use parallel.colocate = false, or another transport")
    if transport not in ("auto", "distributed", "disk") and not colocate:
        why = "with parallel.colocate = false the engine cannot open the trainer's memory"
        yield BrokenRule("weights.transport", f'{why}; use "distributed" or "disk"')
    if expandable:
        why = f"{expandable} makes memory that no scheduler can open (CUDA IPC); remove expandable_segments from it"
        if transport == "pull":
            yield BrokenRule("weights.transport", why)
