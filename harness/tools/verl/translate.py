"""A verl command as a harness config: the TOML with the origin of each value, and what became of each override."""

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.config.layers import ConfigError, toml_value
from harness.config.rules import check
from harness.config.schema import Config
from harness.runtime import redact
from harness.tools.verl.draft import FATES, Draft, Verdict
from harness.tools.verl.mapping import number, translate_all
from harness.tools.verl.overrides import Override, Trainer, VerlConfig, choose_release, flatten, parse_override
from harness.tools.verl.shell_script import VerlCommand
from harness.tools.verl.shrink import shrink

MEGATRON = "Megatron's trainer: its parallel sizes, memory and speed; here FSDP2 over all ranks, with the same formulas"
_CONFIG_OPTION = re.compile(r"(--config-(?:name|path|dir)|-cn|-cp|-cd)(?:=(.*))?", re.DOTALL)


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
    """What the harness's own check says against the config; "" where it can run."""

    def of(self, fate: str) -> list[Verdict]:
        """Return the verdicts of one fate."""
        return [each for each in self.verdicts if each.fate == fate]

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the command is missing, and the harness can run it."""
        return not (self.of("unsupported") or self.of("unknown") or self.refusal)


def translate(
    command: VerlCommand, release: str = "auto", tiny: str = "", environment: Mapping[str, str] = os.environ
) -> Translation:
    """Translate. tiny: "" for the model as it is, "auto", or a tiny model's name. Raise ConfigError, one sentence."""
    overrides, options = read_words(command.words)
    trainer, of_options = which_trainer(overrides, options)
    given = flatten(overrides)
    if release == "auto":
        release, misfits = choose_release(given.values(), trainer)
        chosen = "the newest whose config takes " + ("all overrides" if not misfits else "most overrides, not: ")
        chosen += "; ".join(misfits)
    else:
        chosen = "as asked"
    kept = {key: each for key, each in given.items() if each.mark != "~"}
    draft = Draft(verl=VerlConfig(release=release, trainer=trainer, given=kept), of_command=of_options)
    deleted = "the key is deleted, and verl's code falls back to a value of its own; taken: the config's default"
    for each in given.values():
        if each.mark == "~":
            draft.of_command.append(Verdict(override=each.text, fate="unsupported", text=deleted))
        elif "@" in each.key or each.key == "model_engine":
            is_said = any(each.text == verdict.override for verdict in of_options)
            (draft.irrelevant if is_said or trainer == "megatron" else draft.unsupported)(
                "another group of verl's config", each.key
            )
    translate_all(draft, environment)
    if tiny:
        shrink(draft, tiny)
    config, refusal = draft.config(), ""
    try:
        check(config)
    except ConfigError as error:
        refusal = str(error)
    verdicts = tuple(dict.fromkeys(draft.verdicts()))
    lines = header(f"verl {release} ({chosen})", verdicts, command.not_run, refusal)
    return Translation(
        release=release,
        toml=to_text(draft, lines),
        config=config,
        verdicts=verdicts,
        nodes=number(draft, "trainer.nnodes"),
        refusal=refusal,
    )


def read_words(words: Sequence[str]) -> tuple[list[Override], dict[str, str]]:
    """Return the overrides among verl's arguments, and hydra's options, by name. Raise ConfigError for another option."""
    overrides, options, rest = [], {}, list(words)
    names = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
    while rest:
        word = rest.pop(0)
        match = _CONFIG_OPTION.fullmatch(word)
        if match:
            value = match[2] if match[2] is not None else rest.pop(0) if rest else ""
            options[names.get(match[1], match[1])] = value.strip("'\"")
        elif word.startswith("-"):
            raise ConfigError(f"{word} is an option of hydra that is not translated; leave it out.")
        elif word.strip():
            overrides.append(parse_override(word))
    return overrides, options


def which_trainer(overrides: Sequence[Override], options: Mapping[str, str]) -> tuple[Trainer, list[Verdict]]:
    """Return whose config it is, and what --config-name, --config-path or a strategy would change.

    Raise ConfigError for a config file of the user's, whose values are not known here.
    """
    name = options.get("--config-name", "ppo_trainer").removesuffix(".yaml")
    if name not in ("ppo_trainer", "ppo_megatron_trainer"):
        raise ConfigError(
            f"--config-name={name} is not one of verl's PPO configs (ppo_trainer, ppo_megatron_trainer): its values are not"
            " known here; write its differences as overrides, and leave the option out."
        )
    folder = options.get("--config-path", options.get("--config-dir", "config"))
    verdicts = []
    if folder not in ("config", "./config", "verl/trainer/config") and not folder.endswith("/verl/trainer/config"):
        text = f"a {name}.yaml of that folder; taken: verl's own"
        verdicts.append(Verdict(override=f"--config-path={folder}", fate="unsupported", text=text))
    strategies = {
        each.text: str(each.value)
        for each in overrides
        if each.key in ("model_engine", "actor_rollout_ref.actor.strategy", "critic.strategy") or "@" in each.key
    }
    if name == "ppo_trainer":
        other = next(
            (
                text
                for text, value in strategies.items()
                if re.search("megatron|veomni|torchtitan|mindspeed|automodel", value)
            ),
            "",
        )
        if not other:
            return "fsdp", verdicts
        what = MEGATRON if "megatron" in strategies[other] else MEGATRON.replace("Megatron's", f"{strategies[other]}'s")
        is_megatron = "megatron" in strategies[other]
        return "megatron" if is_megatron else "fsdp", [
            *verdicts,
            Verdict(override=other, fate="unsupported", text=what),
        ]
    return "megatron", [*verdicts, Verdict(override=f"--config-name={name}", fate="unsupported", text=MEGATRON)]


def header(whose: str, verdicts: Sequence[Verdict], not_run: Sequence[str], refusal: str) -> list[str]:
    """Return the comment lines that say what became of the command."""
    counted = Counter(each.fate for each in verdicts)
    lines = [f"Translated from a command of {whose}, whose defaults count where it is silent:"]
    lines.append(", ".join(f"{counted[fate]} {fate}" for fate in FATES) + ".")
    for fate in FATES[1:]:
        lines += [f"{fate}: {each.override}: {each.text}" for each in verdicts if each.fate == fate]
    lines += [f"not run: {each}" for each in not_run]
    return [*lines, *([f"refused by the harness: {refusal}"] if refusal else [])]


def to_text(draft: Draft, lines: Sequence[str]) -> str:
    """Write the entries as TOML, each with its origin."""
    written, sections = [f"# {one_line(line)}" for line in lines], dict[str, list[str]]()
    for key, entry in draft.entries.items():
        section, name, *inner = key.split(".", 2)
        title, name = (f"{section}.{name}", inner[0]) if inner else (section, name)
        name = name if re.fullmatch(r"[\w-]+", name) else json.dumps(name)
        sections.setdefault(title, []).append(f"{name} = {toml_value(entry.value)}  # {one_line(entry.origin)}")
    for title in sorted(sections, key=lambda each: (list(Config.__dataclass_fields__).index(each.split(".")[0]), each)):
        written += ["", f"[{title}]", *sections[title]]
    return "\n".join(written) + "\n"


def one_line(text: str) -> str:
    """Return a text without what would end a comment, in ASCII, and without secrets."""
    return redact.text(" ".join(text.split())).encode("ascii", "backslashreplace").decode()


def launch_lines(translation: Translation, file: str, hosts: int) -> list[str]:
    """Return the commands that run a translated file: by torchrun, dry, and on emulated hosts. Raise ConfigError."""
    parallel, nodes = translation.config.parallel, translation.nodes
    ranks = parallel.dp * parallel.tp * parallel.pp
    if hosts and ranks % hosts:
        raise ConfigError(f"--hosts must divide the {ranks} ranks, got {hosts}.")
    words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks // nodes}"]
    if nodes > 1:
        words += ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST0:29400"]
    dry = ["python3", "launch/ppo.py", file, "--dry-run", "--nnodes", str(nodes)]
    lines = [shlex.join([*words, "launch/ppo.py", file]), shlex.join(dry)]
    if hosts:
        each = str(ranks // hosts)
        emulated = ["python3", "launch/hosts.py", "--hosts", str(hosts), "--ranks-per-host", each]
        lines.append(shlex.join([*emulated, "--", "launch/ppo.py", file]))
    return lines


def summary(translation: Translation) -> str:
    """Return what became of the command, for a person."""
    return "\n".join(line[2:] for line in translation.toml.splitlines() if line.startswith("# "))
