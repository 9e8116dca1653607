"""verl's config as a harness config: the TOML with the origin of each value, and what became of each override."""

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.layers import ConfigError, toml_value
from harness.config.resolve import resolve
from harness.config.schema import Config
from harness.runtime import redact
from harness.tools import environments
from harness.tools.verl.draft import FATES, Draft, Fate, Verdict
from harness.tools.verl.mapping import translate_all
from harness.tools.verl.overrides import (
    Override,
    Trainer,
    VerlConfig,
    differences_from_defaults,
    flatten,
    newest_release,
    parse_override,
    release_with_keys,
)
from harness.tools.verl.plain_script import print_instead
from harness.tools.verl.shrink import shrink

STRATEGIES = ("model_engine", "actor_rollout_ref.actor.strategy", "critic.strategy")
OTHER_TRAINERS = ("megatron", "veomni", "torchtitan", "mindspeed", "automodel")
CONFIG_OPTIONS = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
_RESOLVER = re.compile(r"\$\{(?!oc\.select:)[\w.]+:")
"""The start of a reference that needs more than verl's config, such as ${oc.env:HOME}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A harness config, and how it came about."""

    release: str
    toml: str
    config: Config
    verdicts: tuple[Verdict, ...]
    nodes: int
    """trainer.nnodes."""
    refusal: str
    """Why the harness cannot run the config; "" if it can."""

    def of(self, fate: Fate) -> list[Verdict]:
        """Return the verdicts of one fate."""
        return [each for each in self.verdicts if each.fate == fate]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing, and the harness can run the config."""
        return not (self.of("unsupported") or self.of("unknown") or self.refusal)


def translate(
    words: Sequence[str], release: str = "auto", tiny: str = "", environment: Mapping[str, str] = os.environ
) -> Translation:
    """Translate the words after verl.trainer.main_ppo.

    release: whose keys and defaults count, or auto for the newest that has the keys. tiny: the name of a tiny model,
    "auto" for the one of the path's architecture, or "" for the model as it is. Raise ConfigError, with one sentence,
    for words that cannot be read.
    """
    overrides, options = read_words(words)
    trainer, verdicts = which_trainer(overrides, options, words)
    given = flatten(overrides)
    whose = f"a command of verl {release} (as asked)"
    if release == "auto":
        release, misfits = newest_release(given.values(), trainer)
        which = f"most of its keys, not: {'; '.join(misfits)}" if misfits else "its keys"
        whose = f"a command of verl {release} (the newest release that has {which})"
    whose += ". What it does not set has the defaults of that release."
    kept = {key: each for key, each in given.items() if each.mark != "~"}
    draft = Draft(verl=VerlConfig(release=release, trainer=trainer, given=kept), of_command=verdicts)
    said = {verdict.override for verdict in verdicts}
    for each in given.values():
        if each.mark == "~":
            deleted = "verl's code falls back to a value when a key is deleted; here it has the config's default"
            draft.of_command.append(Verdict(override=each.text, fate="unsupported", text=deleted))
        elif is_config_group(each) and not draft.verl.is_default(each.key):
            (draft.ignore if trainer == "megatron" or each.text in said else draft.lose)(
                "another group of verl's config", each.key
            )
    return finished(draft, whose, tiny, environment)


def translate_printed(
    printed: Mapping[str, Any], release: str = "auto", tiny: str = "", environment: Mapping[str, str] = os.environ
) -> Translation:
    """Translate a config that verl printed, of which only what differs from verl's defaults gets a verdict.

    release: whose keys and defaults count, or auto for the one whose keys these are. tiny: as for a command. Raise
    ConfigError.
    """
    trainer, verdicts = trainer_of(
        [Override(text=f"{key}={value}", mark="", key=key, value=value) for key, value in printed.items()]
    )
    how = "as asked"
    if release == "auto":
        release, how = release_with_keys(printed, trainer), "judged by its keys"
    given = differences_from_defaults(printed, release, trainer)
    draft = Draft(verl=VerlConfig(release=release, trainer=trainer, given=given, printed=printed), of_command=verdicts)
    whose = f"the {len(printed)} keys that verl {release} printed ({how}). What has its default is not counted."
    return finished(draft, whose, tiny, environment)


def finished(draft: Draft, whose: str, tiny: str, environment: Mapping[str, str]) -> Translation:
    """Return the translation of a draft. whose: what was translated, for the header. Raise ConfigError."""
    translate_all(draft, environment)
    if tiny:
        shrink(draft, tiny)
    config, refusal = draft.config(), ""
    try:
        resolve(config)
    except ConfigError as error:
        refusal = str(error)
    verdicts = tuple(dict.fromkeys(draft.verdicts()))
    return Translation(
        release=draft.verl.release,
        toml=to_text(draft, header(whose, verdicts, refusal)),
        config=config,
        verdicts=verdicts,
        nodes=draft.integer("trainer.nnodes"),
        refusal=refusal,
    )


def read_words(words: Sequence[str]) -> tuple[list[Override], dict[str, str]]:
    """Return the overrides among verl's arguments, and its --config options. Raise ConfigError for another option."""
    overrides, options, rest = [], {}, list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        name = CONFIG_OPTIONS.get(name, name)
        if name in CONFIG_OPTIONS.values():
            options[name] = (value if has_value else rest.pop(0) if rest else "").strip("'\"")
        elif word.startswith("-"):
            raise ConfigError(f"{word} is an option of hydra that cannot be translated; leave it out.")
        elif _RESOLVER.search(word) and not word.lstrip("+").startswith("hydra"):
            raise ConfigError(f"only hydra resolves {word}; {print_instead(words)}")
        elif word.strip():
            overrides.append(parse_override(word))
    return overrides, options


def is_config_group(override: Override) -> bool:
    """Return whether an override picks one of verl's config files, as in
    actor@actor_rollout_ref.actor=megatron_actor.
    """
    return "@" in override.key or override.key == "model_engine"


def which_trainer(
    overrides: Sequence[Override], options: Mapping[str, str], words: Sequence[str]
) -> tuple[Trainer, list[Verdict]]:
    """Return whose keys and defaults count, and what the harness lacks of that trainer.

    Raise ConfigError for a config file of the user, whose values are unknown.
    """
    name = options.get("--config-name", "ppo_trainer").removesuffix(".yaml")
    folder = options.get("--config-path", options.get("--config-dir", "config")).rstrip("/")
    is_verls = folder.removeprefix("./") == "config" or f"/{folder}".endswith("/verl/trainer/config")
    if name not in ("ppo_trainer", "ppo_megatron_trainer") or not is_verls:
        raise ConfigError(f"the values of {folder}/{name}.yaml, a config of yours, are unknown; {print_instead(words)}")
    if name == "ppo_megatron_trainer":
        return "megatron", [lacking(f"--config-name={name}", "megatron")]
    return trainer_of(overrides)


def trainer_of(overrides: Iterable[Override]) -> tuple[Trainer, list[Verdict]]:
    """Return the same from verl's keys alone."""
    for each in overrides:
        other = next((other for other in OTHER_TRAINERS if other in str(each.value)), "")
        if other and (each.key in STRATEGIES or is_config_group(each)):
            return "megatron" if other == "megatron" else "fsdp", [lacking(each.text, other)]
    return "fsdp", []


def lacking(override: str, trainer: str) -> Verdict:
    """Return what is missing of a trainer that is not FSDP."""
    own = "" if trainer == "megatron" else ", and the defaults of its own optimizer and schedule"
    theirs = f"{trainer.capitalize()}'s parallel sizes, memory and speed{own}"
    text = f"{theirs}; here FSDP2 over all ranks, with the same formulas"
    return Verdict(override=override, fate="unsupported", text=text)


def header(whose: str, verdicts: Sequence[Verdict], refusal: str) -> list[str]:
    """Return the lines that say what became of the command or config; what has the same reason is in one line."""
    counted = Counter(each.fate for each in verdicts)
    lines = [f"Translated from {whose}"]
    lines.append(", ".join(f"{counted[fate]} {fate}" for fate in FATES) + ".")
    for fate in FATES[1:]:
        by_reason: dict[str, list[str]] = {}
        for each in verdicts:
            if each.fate == fate:
                by_reason.setdefault(each.text, []).append(each.override)
        lines += [f"{fate}: {', '.join(overrides)}: {reason}" for reason, overrides in by_reason.items()]
    return [*lines, *([f"refused by the harness: {refusal}"] if refusal else [])]


def to_text(draft: Draft, lines: Sequence[str]) -> str:
    """Return the TOML: these lines as comments, then every value with its origin."""
    written, sections = [f"# {one_line(line)}" for line in lines], dict[str, list[str]]()
    for key, entry in draft.entries.items():
        section, name, *inner = key.split(".", 2)
        title, name = (f"{section}.{name}", inner[0]) if inner else (section, name)
        name = name if re.fullmatch(r"[\w-]+", name) else json.dumps(name)
        sections.setdefault(title, []).append(
            f"{name} = {toml_value(redact.values(entry.value, key))}  # {one_line(entry.origin)}"
        )
    order = list(Config.__dataclass_fields__)
    for title in sorted(sections, key=lambda title: (order.index(title.split(".")[0]), title)):
        written += ["", f"[{title}]", *sections[title]]
    return "\n".join(written) + "\n"


def one_line(text: str) -> str:
    """Return a text in one line of ASCII, without secrets, so that it fits into a comment."""
    return redact.text(" ".join(text.split())).encode("ascii", "backslashreplace").decode()


def launch_lines(translation: Translation, file: str, hosts: int) -> list[str]:
    """Return the commands that run a translated file: by torchrun, dry, and on emulated hosts. Raise ConfigError."""
    parallel, nodes = translation.config.parallel, translation.nodes
    ranks = parallel.dp * parallel.tp * parallel.pp
    if hosts and ranks % hosts:
        raise ConfigError(f"--hosts must divide the {ranks} ranks, got {hosts}.")
    torchrun = environments.torchrun(environments.made() or Path(sys.executable))
    words = [*torchrun, f"--nnodes={nodes}", f"--nproc-per-node={ranks // nodes}"]
    if nodes > 1:
        words += ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST0:29400"]
    dry = ["python3", "launch/ppo.py", file, "--dry-run", "--nnodes", str(nodes)]
    lines = [shlex.join([*words, "launch/ppo.py", file]), shlex.join(dry)]
    if hosts:
        emulated = ["python3", "launch/hosts.py", "--hosts", str(hosts), "--ranks-per-host", str(ranks // hosts)]
        lines.append(shlex.join([*emulated, "--", "launch/ppo.py", file]))
    return lines


def summary(translation: Translation) -> str:
    """Return what became of the command, for a person."""
    return "\n".join(line[2:] for line in translation.toml.splitlines() if line.startswith("# "))
