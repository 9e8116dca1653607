"""The one place that decides whether a config can work, and what it becomes: resolve()."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain

from harness.config.draft_rules import draft_rules
from harness.config.engine_rules import choose_transport, code_rules, engine_rules, generation_rules
from harness.config.facts import Device, Facts
from harness.config.fp8_rules import fp8_rules
from harness.config.layers import shown
from harness.config.mistakes import NOTHING_READ, KeysRead, Mistake, refuse
from harness.config.model_rules import model_rules, padding_warnings
from harness.config.rules import BrokenRule, config_rules, config_warnings, in_ranges
from harness.config.schema import Config
from harness.config.unread_settings import unread_settings

SECTIONS = tuple(each.name for each in fields(Config))
SYNC_SECTIONS = ("run", "parallel", "network", "model", "engine", "weights", "memory")
"""The sections that launch/sync.py uses: it does not generate or train."""
NOTHING_KNOWN = Facts()


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A config that the known facts do not rule out."""

    config: Config
    """As it will run: values that are "auto" are replaced, and run.epochs has become run.steps, where the facts tell
    how."""
    reasons: tuple[str, ...]
    """A line for each value that was replaced: what it became, and why."""
    warnings: tuple[str, ...]
    """A sentence for each setting that works, but not as its name suggests, or that nothing reads."""
    not_checked: tuple[str, ...]
    """A line for each thing that could not be checked, and why."""


def resolve(
    config: Config,
    facts: Facts = NOTHING_KNOWN,
    sections: Collection[str] = SECTIONS,
    reading: KeysRead = NOTHING_READ,
) -> Resolved:
    """Return the config as it will run.

    Raise ConfigError, or UnsupportedEnvironment, for all that cannot work, one sentence each.

    sections: those that the job uses. Rules about keys of other sections do not apply. reading: who set which key, and
    mistakes that were found before.
    """
    refuse(reading.plus(mistakes(config, facts, sections)))
    device = _device(config, facts)
    reasons = []
    resolved = replace(config, engine=replace(config.engine, device=device or config.engine.device))
    if config.rollout.has_both:
        transport, why = choose_transport(config)
        reasons.append(f'weights.transport = "{transport}" ({why})')
        resolved = replace(resolved, weights=replace(config.weights, transport=transport))
    else:  # nothing is synced, so there is nothing to verify, and the engine needs weights that it can generate with
        resolved = replace(resolved, weights=replace(config.weights, verify=False))
        if config.rollout.only:
            resolved = replace(resolved, engine=replace(resolved.engine, initial_weights="checkpoint"))
    if config.run.epochs and facts.prompts is not None and "task" in sections:
        steps = config.run.epochs * (facts.prompts // config.rollout.prompts_per_step)
        reasons.append(f"run.steps = {steps} (run.epochs = {config.run.epochs} over {facts.prompts} prompts)")
        resolved = replace(resolved, run=replace(config.run, steps=steps))
    warnings = [*config_warnings(config), *(padding_warnings(config, facts) if device == "cpu" else ())]
    if "rollout" in sections:  # a whole run
        warnings += unread_settings(resolved)
        if not config.run.epochs or facts.prompts is not None:
            warnings += _warmup_warnings(resolved)
    return Resolved(
        config=resolved,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        not_checked=tuple(_not_checked(config, facts, device, sections)),
    )


def mistakes(config: Config, facts: Facts, sections: Collection[str] = SECTIONS) -> Iterator[Mistake]:
    """Yield everything that cannot work, as far as the facts tell."""
    judged, out_of_range = in_ranges(config)
    device = _device(judged, facts)
    for wrong in chain(
        out_of_range,
        config_rules(judged),
        code_rules(judged, facts),
        fp8_rules(judged, device),
        draft_rules(judged, facts, device),
        engine_rules(judged, facts, device),
        generation_rules(judged, facts, device) if "rollout" in sections else (),
        model_rules(judged, facts, device),
        _prompt_rules(judged, facts),
    ):
        if wrong.key.partition(".")[0] in sections:
            spoils = (wrong.key,) if wrong.alone else ()
            yield Mistake(sentence(config, wrong), wrong.key, spoils, wrong.unsupported)


def _device(config: Config, facts: Facts) -> Device | None:
    return facts.device if config.engine.device == "auto" else config.engine.device


def sentence(config: Config, wrong: BrokenRule) -> str:
    """Return the sentence for the user: the key, its value, why it cannot work and what to do."""
    section, name, *inner = wrong.key.split(".", 2)
    value = getattr(getattr(config, section), name)
    given = shown(value[inner[0]] if inner else value)
    if wrong.text.startswith("must "):
        return f"{wrong.key} {wrong.text}, got {given}."
    return f"{wrong.key} = {given} cannot work: {wrong.text}."


def _prompt_rules(config: Config, facts: Facts) -> Iterator[BrokenRule]:
    known, what = facts.rows, "rows"
    if facts.prompts is not None:
        known, what = facts.prompts, "prompts of at most task.max_prompt_tokens"
    if known is not None and known < config.rollout.prompts_per_step:
        source = f"the {known} {what} that task.source = {shown(config.task.source)} has"
        yield BrokenRule("rollout.prompts_per_step", f"must be at most {source}, since a step takes no prompt twice")


def _warmup_warnings(config: Config) -> Iterator[str]:
    warmup, steps = config.algorithm.critic_warmup, config.run.steps
    if warmup >= steps:
        yield f"algorithm.critic_warmup = {warmup} is no less than run.steps = {steps}: the actor learns nothing in this run."


def _not_checked(config: Config, facts: Facts, device: Device | None, sections: Collection[str]) -> Iterator[str]:
    looked_at = {
        "device": (device, 'what engine.device = "auto" means, and what depends on it'),
        "sglang": (facts.sglang, "whether sglang has the arguments in engine.args" if config.engine.args else ""),
        "model": (facts.model, f'the config.json of model.name = "{config.model.name}"'),
        "model_types": (facts.model_types, f'whether transformers has the architecture of "{config.model.name}"'),
        "rows": (facts.rows if facts.prompts is None else facts.prompts, "the rows of task.source"),
        "validation": (None, "the rows of validation.source" if "validation" in facts.unknown else ""),
        "reward": (None, f"task.reward = {shown(config.task.reward)}" if "reward" in facts.unknown else ""),
    }
    for name, (known, what) in looked_at.items():
        if known is None and what and (name != "rows" or "task" in sections):
            yield f"{what}: {facts.unknown.get(name, 'unknown')}"
