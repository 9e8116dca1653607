"""One sentence for what makes many names of an export arrive nowhere, where that is certain.

A prefix, or a number, is changed as the sentence says, and the engine's loaders are asked again: the sentence says how
many names then arrive. The others follow from fields of config.json.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.tools.full_size.checkpoint_beside import is_of_mtp_layer
from harness.tools.full_size.name_lists import NameLists
from harness.tools.full_size.ranks_at_true_size import NO_LAYER, at_layer, layer_of
from harness.weights.tensor_view import TensorView, without_numbers

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_layer.")
"""Parts of names that torch.compile, FSDP, activation checkpointing and PEFT put in."""
PACKED = {
    ".qweight": ("AWQ or GPTQ", ("awq", "gptq", "awq_marlin", "gptq_marlin")),
    ".weight_packed": ("compressed-tensors", ("compressed-tensors",)),
    ".weight_scale_inv": ("blocks of float8", ("fp8",)),
    "_blocks": ("MXFP4", ("mxfp4",)),
}
"""End of a name -> the quantization whose names end so, and what config.json calls it."""
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
"""Part of a name -> those of the tensors that are its rows, one after the other."""
EXPERT = re.compile(r"\.experts\.\d+\.")
MEGATRON = ("self_attention.linear_", "word_embeddings.", "output_layer.")
"""Parts of the names of Megatron-core's modules."""
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
        return tuple(name for line in self.lists.unexpected for name in line.names)

    @property
    def unsent(self) -> dict[str, tuple[int, ...]]:
        """The names that are expected and not sent, with their shapes where transformers' class knows them."""
        return {
            name: self.expected[name].shape
            for line in self.lists.unsent
            for name in line.names
            if name in self.expected
        }

    @property
    def language(self) -> Mapping[str, Any]:
        """The fields of the language model."""
        return self.fields.get("text_config") or self.fields


def causes_of(found: Suspects, ask: Ask) -> tuple[str, ...]:
    """Return what is certain about the causes of what these lists have."""
    if not found.lists.wrong:
        return ()
    unconverted = tuple(_megatron(found))  # their prefixes are other ones too
    asking = (_other_numbers,) if unconverted else (_other_numbers, _other_prefix)
    asked = (sentence for each in asking for sentence in each(found, ask))
    seen = (sentence for each in (_quantized, _live, _fused, _stacked, _tied) for sentence in each(found))
    return (*unconverted, *asked, *seen)


def _other_prefix(found: Suspects, ask: Ask) -> Iterator[str]:
    """Tell of names that arrive once a prefix, or a wrapper's part, is another."""
    renamed, what, remedy = _renamed(found)
    if not renamed:
        return
    then = ask([replace(view, name=renamed.get(view.name, view.name)) for view in found.sent])
    lost = {name for line in (*then.unexpected, *then.misshapen) for name in line.names}
    arriving = sum(name not in lost for name in renamed.values())
    if not arriving:
        return
    all_of_them = len(renamed) == len(found.sent)
    whose = f"all {len(renamed):,} names" if all_of_them else f"{len(renamed):,} of the {len(found.sent):,} names"
    count = "all" if arriving == len(renamed) else f"{arriving:,}"
    rest = f", and this is still wrong: {then.wrong[0]}" if then.wrong else ", and nothing else is wrong"
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
    total = int(found.language.get("num_hidden_layers") or 0)
    behind = int(found.language.get("num_nextn_predict_layers") or 0)
    layers = {layer_of(view.name) for view in found.sent} - {NO_LAYER}
    due, extra = set(range(total)), {each for each in layers if each >= total + behind}
    lacking = due - layers
    if not total or not layers or not (extra or lacking):
        return
    known = f"config.json has {total} layers, 0 to {total - 1}" + (f", and the MTP layer {total}" if behind else "")
    wrong = [f"{_ranges(extra)} sent besides"] if extra else []
    wrong += [f"{_ranges(lacking)} not sent"] if lacking else []
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


def _quantized(found: Suspects) -> Iterator[str]:
    """Tell of names of a quantization that config.json does not have, and of one whose names are not sent."""
    method = (found.fields.get("quantization_config") or found.language.get("quantization_config") or {}).get(
        "quant_method"
    )
    for end, (title, methods) in PACKED.items():
        count = sum(name.endswith(end) for name in found.unexpected)
        if count and method not in methods:
            has = f"quant_method {method}" if method else "no quantization_config"
            yield f"{count:,} names end in {end}, as those in {title} do, and MODEL's config.json has {has}: the engine is built otherwise"
        unsent = sum(name.endswith(end) for line in found.lists.unsent for name in line.names)
        if not unsent or method not in methods or any(view.name.endswith(end) for view in found.sent):
            continue
        if other := _other_end(found, end):
            yield f"{unsent:,} names end in {other}, and the engine expects {end} in its place, in the same shapes"
        else:
            yield f"MODEL's config.json has quant_method {method}, and no name that is sent ends in {end}: the export is not quantized so"


def _other_end(found: Suspects, end: str) -> str:
    """Return how the names end that are sent in place of all those that end so, with the same shapes; "" if none are."""
    shapes = {view.name: view.shape for view in found.sent}
    due = {name.removesuffix(end): shape for name, shape in found.unsent.items() if name.endswith(end)}
    stems = {name: name.rpartition(".")[0] for name in found.unexpected}
    instead = {stem: name for name, stem in stems.items() if due.get(stem) == shapes[name]}
    ends = {name.removeprefix(stem) for stem, name in instead.items()}
    return ends.pop() if len(ends) == 1 and instead.keys() == due.keys() else ""


def _live(found: Suspects) -> Iterator[str]:
    """Tell of names that transformers' class has in memory alone."""
    live = [name for name in found.unexpected if name in found.live]
    if live:
        yield (
            f"{len(live):,} names, such as {live[0]}, are those that transformers' class has in memory; save_pretrained writes"
            " others, which the engine expects"
        )


def _fused(found: Suspects) -> Iterator[str]:
    """Tell of tensors that hold, row after row, several that the engine expects apart."""
    unsent, shapes = found.unsent, {view.name: view.shape for view in found.sent}
    for fused, parts in FUSED.items():
        names = [
            name
            for name in found.unexpected
            if fused in name
            and all(unsent.get(name.replace(fused, part)) for part in parts)
            and shapes[name][:1] == (sum(unsent[name.replace(fused, part)][0] for part in parts),)
        ]
        if names:
            yield f"{len(names):,} names, such as {names[0]}, hold what the engine expects as {', '.join(parts)}, each in a tensor of its own"


def _stacked(found: Suspects) -> Iterator[str]:
    """Tell of tensors that hold all experts, of which the engine expects each in a tensor of its own."""
    experts = Counter(
        (EXPERT.sub(".experts.", name), shape) for name, shape in found.unsent.items() if EXPERT.search(name)
    )
    shapes = {view.name: view.shape for view in found.sent}
    names = [name for name in found.unexpected if experts.get((name, shapes[name][1:])) == next(iter(shapes[name]), 0)]
    if names:
        yield f"{len(names):,} names, such as {names[0]}, hold all experts, of which the engine expects each in a tensor of its own"


def _megatron(found: Suspects) -> Iterator[str]:
    """Tell of names that nobody converted from Megatron-core."""
    names = [name for name in found.unexpected if any(part in name for part in MEGATRON)]
    if names:
        yield f"{len(names):,} names, such as {names[0]}, are those of Megatron-core's modules: they were not converted"


def _tied(found: Suspects) -> Iterator[str]:
    """Tell of a head that config.json does not tie to the embedding."""
    tied = found.fields.get("tie_word_embeddings", found.language.get("tie_word_embeddings"))
    unsent = [name for line in found.lists.unsent for name in line.names]
    if tied is False and "lm_head.weight" in unsent and not found.unexpected:
        yield "MODEL's config.json does not tie the head to the embedding, so lm_head.weight must be sent"


def _ranges(numbers: Iterable[int]) -> str:
    """Return layers in words: layers 3, 5 to 8 are."""
    runs: list[list[int]] = []
    for number in sorted(numbers := set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in runs)
    return f"layers {told} are" if len(numbers) > 1 else f"layer {told} is"
