"""Settings that were changed although nothing in the run reads them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from harness.config.layers import shown
from harness.config.schema import Config

DEFAULTS = Config()


@dataclass(frozen=True, slots=True)
class Unread:
    """Settings that some runs do not read."""

    keys: str
    """section.name, or a section for all of its keys."""
    when: Callable[[Config], bool]
    why: str
    """Why such a run does not read them. {config.section.name} is replaced by its value."""


UNREAD = (
    Unread(
        "critic algorithm.gamma algorithm.lam",
        lambda config: not config.algorithm.has_critic,
        'algorithm.advantage = "{config.algorithm.advantage}" has no critic and no discount',
    ),
    Unread(
        "algorithm.normalize_by_std",
        lambda config: config.algorithm.advantage != "grpo",
        'algorithm.advantage = "{config.algorithm.advantage}" does not divide by the standard deviation of a prompt\'s responses',
    ),
    Unread(
        "algorithm.kl_coefficient",
        lambda config: config.algorithm.kl_placement == "none",
        'with algorithm.kl_placement = "none" there is no KL',
    ),
    Unread(
        "actor.microbatch_size",
        lambda config: config.actor.tokens_per_microbatch > 0,
        "actor.tokens_per_microbatch = {config.actor.tokens_per_microbatch} replaces it",
    ),
    Unread(
        "parallel.rank_order",
        lambda config: 1 in (config.parallel.tp, config.parallel.pp),
        "with parallel.tp = {config.parallel.tp} and parallel.pp = {config.parallel.pp} both orders are the same",
    ),
    Unread(
        "weights.folder",
        lambda config: config.weights.transport not in ("auto", "disk"),
        'weights.transport = "{config.weights.transport}" writes no weights',
    ),
    Unread(
        "validation",
        lambda config: not config.validation.source,
        "validation.source is empty, so nothing is validated",
    ),
    Unread(
        "checkpoint.keep",
        lambda config: not config.checkpoint.every,
        "with checkpoint.every = 0 no checkpoint is saved",
    ),
    Unread(
        "checkpoint.folder",
        lambda config: not config.checkpoint.every and config.checkpoint.resume != "latest",
        "with checkpoint.every = 0 no checkpoint is saved",
    ),
    Unread(
        "trackers.project trackers.experiment",
        lambda config: "wandb" not in config.trackers.names,
        "wandb is not among trackers.names",
    ),
)


def unread_settings(config: Config) -> Iterator[str]:
    """Yield a sentence for each reason for which settings that differ from their defaults are not read."""
    for each in UNREAD:
        keys = [
            key for words in each.keys.split() for key in _keys(words) if _value(config, key) != _value(DEFAULTS, key)
        ]
        if keys and each.when(config):
            listed = ", ".join(f"{key} = {shown(_value(config, key))}" for key in keys)
            yield f"{listed} {'has' if len(keys) == 1 else 'have'} no effect: {each.why.format(config=config)}."


def _keys(word: str) -> list[str]:
    """Return all keys of a section. A word with a dot is one key already."""
    return [word] if "." in word else [f"{word}.{each.name}" for each in fields(getattr(DEFAULTS, word))]


def _value(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
