"""One sentence for what makes many names of an export arrive nowhere, where that is certain.

A prefix, or a number, is changed as the sentence says, and the engine's loaders are asked again: the sentence says how
many names then arrive. Names that transformers' class has in memory alone are told by that class.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.runtime.ranks import runs
from harness.tools.full_size.checkpoint_beside import is_of_mtp_layer
from harness.tools.full_size.name_lists import NameLists
from harness.weights.findings import grouped
from harness.weights.layer_names import NO_LAYER, at_layer, layer_of
from harness.weights.tensor_view import TensorView, without_numbers

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_layer.")
"""Parts of names that torch.compile, FSDP, activation checkpointing and PEFT put in."""
Ask = Callable[[Sequence[TensorView]], NameLists]
"""Gives other names to the engine's loaders, and returns their lists."""


@dataclass(frozen=True, kw_only=True)
class Suspects:
    """What a cause is looked for in."""

    sent: Sequence[TensorView]
    lists: NameLists
    expected: Mapping[str, TensorView]
    """What transformers' class would save, by name."""
    own: Collection[str]
    """The names of the engine's own parameters."""
    live: Collection[str]
    """Names that transformers' class has in memory, and does not save."""
    fields: Mapping[str, Any]
    """Of MODEL's config.json."""

    @property
    def unexpected(self) -> tuple[str, ...]:
        """The names that are sent and not expected."""
        return tuple(each.tensor for each in self.lists.unexpected)


def causes_of(found: Suspects, ask: Ask) -> tuple[str, ...]:
    """Return what is certain about the causes of what these lists have."""
    if not found.lists.wrong:
        return ()
    return (*_other_numbers(found, ask), *_other_prefix(found, ask), *_live(found))


def _other_prefix(found: Suspects, ask: Ask) -> Iterator[str]:
    """Tell of names that arrive once a prefix, or a wrapper's part, is another."""
    renamed, what, remedy = _renamed(found)
    if not renamed:
        return
    then = ask([replace(view, name=renamed.get(view.name, view.name)) for view in found.sent])
    lost = {each.tensor for each in (*then.unexpected, *then.misshapen)}
    arriving = sum(name not in lost for name in renamed.values())
    if not arriving:
        return
    all_of_them = len(renamed) == len(found.sent)
    whose = f"all {len(renamed):,} names" if all_of_them else f"{len(renamed):,} of the {len(found.sent):,} names"
    count = "all" if arriving == len(renamed) else f"{arriving:,}"
    rest = f", and this is still wrong: {grouped(then.wrong)[0]}" if then.wrong else ", and nothing else is wrong"
    yield f"{whose} have {what}; {remedy} {count} of them arrive (the loaders were asked){rest}"


def _renamed(found: Suspects) -> tuple[dict[str, str], str, str]:
    """Return other names for those that are not expected; in words, what is other about them, and the remedy."""
    # Names of an MTP layer end as those of any other layer.
    saved = [name for name in found.expected if not is_of_mtp_layer(name, found.fields)]
    known = frozenset(map(without_numbers, saved or found.own))
    heads = _heads(known)
    clean = {name: _unwrapped(name) for name in found.unexpected}
    patterns = dict.fromkeys(map(without_numbers, clean.values()))
    rules = {pattern: rule for pattern in patterns if (rule := _prefix_rule(pattern, known, heads))}
    renamed = {
        name: rules[pattern][1] + plain.removeprefix(rules[pattern][0])
        for name, plain in clean.items()
        if (pattern := without_numbers(plain)) in rules
    }
    renamed = {name: new for name, new in renamed.items() if new != name}
    parts = [part for part in WRAPPERS if any(part in name for name in renamed)]
    changes = [rule for rule in dict.fromkeys(rules.values()) if rule[0] != rule[1]]
    what = [f"{part} in them, which a wrapper of the trainer's puts there" for part in parts]
    what += [_rule_words(rule) for rule in changes]
    if any(new for _, new in changes):
        return renamed, ", and ".join(what), "with MODEL's prefix"
    return renamed, ", and ".join(what), "without it" if len(what) == 1 else "without these"


def _unwrapped(name: str) -> str:
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def _prefix_rule(pattern: str, known: Collection[str], heads: Sequence[str]) -> tuple[str, str] | None:
    """Return (prefix, the prefix in its place) with which a name is known, the shortest such; None if there is none.

    pattern: the name without its numbers.
    """
    if pattern in known:
        return "", ""
    parts = pattern.split(".")
    for cut in range(len(parts) - 1):
        if "*" in parts[:cut]:
            return None
        rest = ".".join(parts[cut:])
        for head in heads:
            if head + rest in known:
                return "".join(f"{part}." for part in parts[:cut]), head
    return None


def _heads(known: Collection[str]) -> list[str]:
    """Return the beginnings that known names have before their first number, shortest first."""
    found = {""}
    for name in known:
        parts = name.split(".")
        for end in range(1, min(len(parts) - 1, 4)):
            if "*" in parts[:end]:
                break
            found.add("".join(f"{part}." for part in parts[:end]))
    return sorted(found, key=lambda head: (head.count("."), head))


def _rule_words(rule: tuple[str, str]) -> str:
    old, new = rule
    if not new:
        return f"the prefix {old}"
    return f"the prefix {old} in place of {new}" if old else f"no prefix {new}"


def _other_numbers(found: Suspects, ask: Ask) -> Iterator[str]:
    """Tell of layers that are sent or lacking as whole layers, and whether another first number explains it."""
    language = found.fields.get("text_config") or found.fields
    total = int(language.get("num_hidden_layers") or 0)
    behind = int(language.get("num_nextn_predict_layers") or 0)
    layers = {layer_of(view.name) for view in found.sent} - {NO_LAYER}
    due, extra = set(range(total)), {each for each in layers if each >= total + behind}
    lacking = due - layers
    if not total or not layers or not (extra or lacking):
        return
    known = f"config.json has {total} layers, 0 to {total - 1}" + (f", and the MTP layer {total}" if behind else "")
    wrong = [f"{_called(extra)} sent besides"] if extra else []
    wrong += [f"{_called(lacking)} not sent"] if lacking else []
    yield f"{known}; {' and '.join(wrong)}{_with_first_zero(found, layers, total, ask)}"


def _with_first_zero(found: Suspects, layers: Collection[int], total: int, ask: Ask) -> str:
    """Return what would arrive if the layers were counted from zero, if they are consecutive and as many as MODEL's."""
    first = min(layers)
    if not first or sorted(layers) != list(range(first, first + total)):
        return ""
    moved = [replace(view, name=at_layer(view.name, layer_of(view.name) - first)) for view in found.sent]
    then = ask(moved)
    arrives = "every name arrives" if not then.wrong else f"these are wrong: {then.counts()}"
    return f"; counted from 0 instead of {first}, {arrives} (the loaders were asked)"


def _live(found: Suspects) -> Iterator[str]:
    """Tell of names that transformers' class has in memory alone."""
    live = [name for name in found.unexpected if name in found.live]
    if live:
        yield (
            f"{len(live):,} names, such as {live[0]}, are those that transformers' class has in memory; save_pretrained writes"
            " others, which the engine expects"
        )


def _called(layers: Collection[int]) -> str:
    return f"layers {runs(sorted(layers))} are" if len(layers) > 1 else f"layer {next(iter(layers))} is"
