"""Time whole PPO steps by phase, and compare each phase with what this machine could do.

    torchrun --nproc-per-node=2 launch/step_bench.py configs/cpu/quickstart.toml
    torchrun --nproc-per-node=4 launch/step_bench.py configs/gpu/step_qwen2_7b.toml --prompt-tokens 512

After a first step that compiles and --repeats that count, the same engine runs SGLang's own offline bench on the same
prompts and lengths, every rank multiplies matrices, and the weights' bytes are gathered: the limits of generation, of
log-probs and updates, and of the sync. TOML files and --section.key VALUE as for launch/ppo.py; run.steps is not read.
Exit codes: 0 done, 1 failed, 2 the command line or config is wrong.
"""

import os
import sys
from dataclasses import dataclass

import _checkout

_checkout.use()

from harness.observer import RunContext
from harness.runtime.errors import rank_in, report_user_error
from harness.tools.command_line import exit_with, read_command, read_known_options, refuse_plan_options
from harness.tools.start_job import start_job


@dataclass(kw_only=True)
class Options:
    """TOML files and --section.key VALUE follow; see launch/ppo.py --help for the keys."""

    repeats: int = 3
    """Timed steps; the table shows their median."""
    prompt_tokens: int = 0
    """Replace each prompt of the task by so many random tokens; 0 keeps the task's prompts."""
    json: str = ""
    """Write the table there too."""


def main(arguments: list[str]) -> int:
    """Return the exit code. A wrong command line is reported before anything heavy is imported."""
    rank = rank_in(os.environ)
    if rank and {"-h", "--help"} & set(arguments):
        return 0
    try:
        options, rest = read_known_options(Options, "launch/step_bench.py", __doc__ or "", arguments)
        if options.repeats < 1:
            raise ValueError(f"--repeats = {options.repeats} must be at least 1.")
        command = read_command([*rest, "--run.steps", str(options.repeats + 1)], Options)
        refuse_plan_options(command.options)
        config = command.config
        if options.prompt_tokens and not 0 < options.prompt_tokens <= config.task.max_prompt_tokens:
            raise ValueError(
                f"--prompt-tokens = {options.prompt_tokens} must be 1 to task.max_prompt_tokens = {config.task.max_prompt_tokens}."
            )
        if not config.rollout.has_both:
            raise ValueError("rollout.load and rollout.only leave half a step; leave them out to time a whole one.")
    except ValueError as error:
        return report_user_error(error, rank)

    def job(context: RunContext) -> str:
        from harness.tools.step_bench.bench import StepBench  # imports transformers, so only now

        return StepBench(repeats=options.repeats, prompt_tokens=options.prompt_tokens, json=options.json)(context)

    return start_job(command, "launch/step_bench.py", arguments, job)


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
