"""Rules about a draft model (speculative decoding): what a sync can keep in step with the target, and what SGLang can
serve.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.engine_rules import choose_transport
from harness.config.facts import Device, Facts, SGLangFacts
from harness.config.rules import BrokenRule
from harness.config.schema import Config

KEY = "engine.args.speculative_algorithm"
WITHOUT_MODEL = ("NGRAM", "UNO")
"""Algorithms that load no second model."""
OF_THE_CHECKPOINT = ("EAGLE", "NEXTN")
"""Algorithms whose draft may be the checkpoint's own layer for multi-token prediction (MTP). NEXTN is another name of
EAGLE."""
LAYERS = "num_nextn_predict_layers"
CHAIN = {"speculative_num_steps": 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2}
"""What the CPU's stand-ins can serve: one draft at a time."""


def draft_of(arguments: Mapping[str, Any]) -> str:
    """Return the algorithm if these engine arguments make SGLang load a draft model; otherwise ""."""
    algorithm = str(arguments.get("speculative_algorithm") or "").upper()
    return "" if algorithm in WITHOUT_MODEL else algorithm


def sends_mtp_layer(arguments: Mapping[str, Any]) -> bool:
    """Return whether the draft model is the MTP layer of the model's own checkpoint, which every sync sends too."""
    return draft_of(arguments) in OF_THE_CHECKPOINT and not arguments.get("speculative_draft_model_path")


def draft_rules(config: Config, facts: Facts, device: Device | None) -> Iterator[BrokenRule]:
    """Yield what is wrong with the draft model, if there is one. facts: rules that need an unknown fact are skipped."""
    arguments = config.engine.args
    if device == "cpu" and arguments.get("speculative_algorithm"):
        yield from (refused := list(_on_cpu(arguments, facts.sglang)))
        if any(each.unsupported for each in refused):
            return
    if not draft_of(arguments):
        return
    if not sends_mtp_layer(arguments):
        yield from _of_another_checkpoint(config)
        return
    if config.parallel.pp > 1:
        why = "the last pipeline stage alone has the draft model, which cannot be compared stage by stage here"
        yield BrokenRule("parallel.pp", f"{why}; use 1, or remove {KEY}")
    yield from _layer(config, facts)
    if config.rollout.has_both:
        yield from _sync(config, facts.sglang, device)


def _on_cpu(arguments: Mapping[str, Any], sglang: SGLangFacts | None) -> Iterator[BrokenRule]:
    """Yield what SGLang's CPU mode, with the stand-ins for its kernels, cannot serve: all but a chain of one draft."""
    algorithm = str(arguments["speculative_algorithm"]).upper()
    if not sends_mtp_layer(arguments):
        why = f"its kernels for {algorithm} have no stand-in; those for EAGLE and NEXTN with the model's own MTP layer have"
        yield BrokenRule(KEY, f"SGLang's CPU mode cannot serve it: {why}; use a GPU, or remove it", unsupported=True)
        return
    if sglang and sglang.why_no_drafts_on_cpu:
        why = f"SGLang's CPU mode cannot serve it with sglang {sglang.version}: {sglang.why_no_drafts_on_cpu}"
        yield BrokenRule(KEY, f"{why}; use a GPU, a newer release, or remove it", unsupported=True)
        return
    for name, needed in CHAIN.items():
        if arguments.get(name) != needed:
            why = f"on the CPU it must be {needed}: its stand-ins know one draft at a time"
            listed = ", ".join(f"engine.args.{each} = {value}" for each, value in CHAIN.items())
            key = f"engine.args.{name}" if name in arguments else KEY
            yield BrokenRule(key, f"{why if name in arguments else f'{name} is not set, and {why}'}; use {listed}")
            return


def _of_another_checkpoint(config: Config) -> Iterator[BrokenRule]:
    """Refuse checks of a draft that is another model: SGLang offers it the trainer's tensors, which are not its own."""
    why = (
        f"SGLang also updates the draft model of {KEY} = {draft_of(config.engine.args)}, for which there is no trainer"
    )
    if config.weights.transport == "pull":
        yield BrokenRule("weights.transport", f'{why}; use "bucket", "tensor" or "disk"')
    if config.weights.verify:
        yield BrokenRule("weights.verify", f"{why}, so nothing can be compared; use false")


def _layer(config: Config, facts: Facts) -> Iterator[BrokenRule]:
    """Refuse a model without one MTP layer in its checkpoint, as the engine holds it."""
    if facts.model is not None:
        language = facts.model.get("text_config") or facts.model
        layers = language.get(LAYERS) or 0
        if layers != 1:
            given = (
                f"config.json of the model says {LAYERS} = {layers}, and SGLang's draft model is exactly one such layer"
            )
            tiny = f"; for the tiny model deepseek_v3 set model.overrides.{LAYERS} = 1" if layers == 0 else ""
            yield BrokenRule(KEY, f"{given}{tiny}; use a model that has one, or remove it")
    if config.model.weights == "random":
        why = "the draft's layer is read from the checkpoint, because no trainer has it"
        yield BrokenRule("model.weights", f'{why}; use "checkpoint", or remove {KEY}')


def _sync(config: Config, sglang: SGLangFacts | None, device: Device | None) -> Iterator[BrokenRule]:
    """Refuse transports that would leave the draft model behind, or that SGLang cannot use for two models."""
    transport, _ = choose_transport(config)
    if sglang and transport == "distributed" and not sglang.updates_drafts_by_group:
        why = f"sglang {sglang.version} never updates the draft model in an update group (sglang#27718)"
        yield BrokenRule("weights.transport", f'{why}; use "bucket" with parallel.colocate = true, or a newer release')
    if transport == "tensor" and device == "cpu":
        why = "SGLang opens each tensor's handle for the target and again for the draft, and on the CPU a handle opens once"
        yield BrokenRule("weights.transport", f'{why}; use "bucket"')
