"""A script's command, as bash expands it, with nothing started and nothing written."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.config.layers import ConfigError
from harness.tools.verl import shell_script
from harness.tools.verl.confine import MEMORY, confine
from harness.tools.verl.shell_script import command_of_script, command_of_words

MAIN = "python3 -m verl.trainer.main_ppo"


def words(script: str, *arguments: str, **environment: str) -> tuple[str, ...]:
    return command_of_script(script, arguments, {"HOME": "/h", **environment}).words


def test_variables_quotes_continuations_comments_arrays_and_arguments() -> None:
    script = f"""#!/usr/bin/env bash
set -xeuo pipefail
A=$HOME/x; B=${{B:-"two words"}}; N=$((1024 * 2))  # a comment's quote
LIST="['$A', '$B']"
ARRAY=(
    one=1   # why
    "two=$B"
)
ARRAY+=(three=$N)
export PATH=/opt/bin:$PATH
PYTHONUNBUFFERED=1 {MAIN} \\
    data.train_files="$LIST" \\
    trainer.logger=['console','wandb'] \\
    "${{ARRAY[@]}}" $@ > run.log 2>&1
"""
    assert words(script, "last=1", "more=2") == (
        "data.train_files=['/h/x', 'two words']",
        "trainer.logger=[console,wandb]",
        "one=1",
        "two=two words",
        "three=2048",
        "last=1",
        "more=2",
    )
    assert "two=given" in words(script, B="given")


def test_the_scripts_own_folder() -> None:
    for path in ("${BASH_SOURCE[0]}", "${BASH_SOURCE}", "$BASH_SOURCE", "${BASH_SOURCE[0]:-$0}"):
        assert words(f'set -u; D="$(dirname "{path}")"; {MAIN} a=$D') == ("a=.",)


def test_date_is_the_only_command_that_has_a_result() -> None:
    script = (
        f"D=${{D:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}}\n{MAIN} name=$(date +%Y)-$D"
    )
    [found] = words(script)
    assert found.startswith("name=20") and found.endswith("-gpu")


def test_what_a_command_would_have_printed_is_a_hole() -> None:
    script = f"""
MODEL=$(cat model.txt)
LENGTH=$(awk '{{print $1}}' lengths)
BATCH=$(echo "1024*24" | bc)
RATE=$(python3 -c "print(1e-6 * 2)")
HERE=$(dirname "$0")/data; NAME=$(basename /a/run.sh .sh)
GPUS=$(nvidia-smi -L | wc -l); if [ "$GPUS" -gt 4 ]; then BIG=1; fi
{MAIN} model=$MODEL tokens=$BATCH ${{LENGTH:+length=$LENGTH}} lr=${{RATE:-1e-6}} files=$HERE name=$NAME a=1 $(cat more)
"""
    found = command_of_script(script, [], {"HOME": "/h"})
    assert found.words == ("files=./data", "name=run", "a=1")
    assert [hole.text for hole in found.holes] == [
        "model=$(cat model.txt)",
        "tokens=$(bc)",
        "length=$(awk {print $1} lengths)",
        "lr=$(python3 -c print(1e-6 * 2))",
        "$(cat more)",
    ]


def test_a_file_that_is_not_read_may_set_anything() -> None:
    script = (
        f"source ~/.bashrc\nsource /opt/conda/bin/activate verl\nsource ./env.sh\neval $(cat env)\n{MAIN} a=${{BS:-64}}"
    )
    found = command_of_script(script, [], {"HOME": "/h"})
    assert found.words == ("a=64",) and [hole.text for hole in found.holes] == ["source ./env.sh", "$(cat env)"]


def test_a_trace_over_several_lines_is_no_error_of_bash() -> None:
    script = f'set -x\nA="one=1\ntwo=2"\n{MAIN} a=1'
    assert command_of_script(script, [], {"HOME": "/h"}).not_run == ()


def processes_of(leader: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, text = int(status.parent.name), status.read_text()
            state, _, _, session, *_ = text.rpartition(")")[2].split()
            found += [pid] if int(session) == leader and state not in "ZX" else []
    return found


def test_a_script_cannot_write_a_file_or_reach_a_process(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine\nall\n")
    with subprocess.Popen(["sleep", "600"]) as other:
        script = f"""
history -c; history -s gone; history -w {precious}; builtin history -w {precious}; enable history kill
builtin history -w {precious}; command history -w {precious}; HISTFILE={precious}
HISTFILESIZE=0; set -o history
builtin kill -9 {other.pid}; command kill -9 {other.pid}; kill -9 {other.pid}
trap 'echo x > {precious}' EXIT; printf -v 'a[$(echo x > {precious})]' x; mapfile -C 'echo x > {precious};' -c 1 < {precious}
hash -p /bin/rm rm; rm {precious}; BASH_CMDS[rm]=/bin/rm; rm {precious}; command -p rm {precious}; exec /bin/rm {precious}
enable -f /bin/rm rm; eval 'exec 7<>{precious}'; eval 'echo x >| {precious}'; unset -f exec; exec 7> {precious}
{MAIN} a=1
"""
        assert words(script, HISTFILE=str(precious)) == ("a=1",)
        assert precious.read_text() == "mine\nall\n" and other.poll() is None
        other.kill()


@pytest.mark.parametrize(
    "background",
    [
        "(while :; do :; done) & read -t 600 < <(while :; do :; done) &",
        "(trap '' HUP INT TERM; while :; do :; done) & disown -a",
        "f() { f & }; f",  # each starts the next and ends: no list of processes has the one that lives
        "coproc { read -t 600; }",
    ],
)
@pytest.mark.parametrize("mode", ["", "set -m;"])
def test_nothing_of_a_script_outlives_it(mode: str, background: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_script, "BACKGROUND_SECONDS", 0.2)
    [word] = words(f"{mode} {background.replace('{ f', '{ ' + mode + ' f')}\n{MAIN} a=$BASHPID")
    monkeypatch.undo()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and processes_of(int(word.removeprefix("a="))):
        pass  # killed processes end in a moment
    assert not any(processes_of(int(word.removeprefix("a="))) for _ in range(10))


def test_a_confined_process_stays_in_its_group_and_within_its_limits() -> None:
    program = "import os, resource; os.setpgid(0, 0); os.setsid(); print(os.getpgrp() == os.getppid())"
    program += "; print(*(resource.getrlimit(each)[1] for each in (resource.RLIMIT_CORE, resource.RLIMIT_AS)))"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    done = subprocess.run(
        [sys.executable, "-c", outer], preexec_fn=confine, start_new_session=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["True", f"0 {MEMORY}"], done.stderr


def test_the_command_of_a_pipe_whose_reader_ends_first_is_whole() -> None:
    script = f"set -x\n{MAIN} a={'x' * 3000} b={'y' * 3000} 2>&1 | tee run.log"
    assert [len(word) for word in words(script)] == [3002, 3002]


def test_nothing_is_started_or_written_and_it_is_said(tmp_path: Path) -> None:
    out = tmp_path / "written"
    script = f"touch {out}\n/bin/touch {out}\necho x > {out}\ncp /etc/passwd {out}\nPATH=/bin:/usr/bin\ntouch {out}\n{MAIN} a=1"
    found = command_of_script(script, [], {"HOME": "/h"})
    assert found.words == ("a=1",) and not out.exists()
    assert [line.split()[0] for line in found.not_run].count("touch") == 2 and "restricted" in str(found.not_run)


def test_comparisons_are_no_redirections_and_secrets_stay_out() -> None:
    script = f"N=8; if (( N > 4 )) && [[ b > a ]]; then A=big; else A=small; fi; read X < /etc/passwd; {MAIN} a=$A x=$X k=$WANDB_API_KEY"
    found = command_of_script(script, [], {"HOME": "/h", "WANDB_API_KEY": "0123456789abcdef"})
    big, key = found.words
    assert big == "a=big" and "0123" not in key and "redacted" in key
    assert [hole.text for hole in found.holes] == ["x=$(cat /etc/passwd)"]


@pytest.mark.parametrize(
    ("lines", "hole"),
    [
        ("read X < f; A=(a=$X)", "a=$(cat f)"),
        ('read X<"$D/my f"; A=(a=$X)', "a=$(cat d/my f)"),
        ("set -e; while read line; do A+=($line); done < f", "$(cat f)"),
        ("mapfile -t A < f", "$(cat f)"),
        ('X="$(< f)"; A=(a=$X)', "a=$(cat f)"),
        ("A=(a=`<f`)", "a=$(cat f)"),
        ("X=$(wc -l < f); A=(a=$X)", "a=$(wc -l)"),
    ],
)
def test_what_a_file_holds_is_a_hole(lines: str, hole: str) -> None:
    found = command_of_script(f'D=d\n{lines}\n{MAIN} one=1 "${{A[@]}}"', [], {"HOME": "/h"})
    assert found.words == ("one=1",) and [each.text for each in found.holes] == [hole]


@pytest.mark.parametrize(
    ("lines", "holes"),
    [
        ("read A B < f", "a=$(cat f) b=$(cat f)"),
        ("IFS=, read -r A B < f", "a=$(cat f) b=$(cat f)"),
        ('read A B <<< "$(cat f)"', "a=$(cat f) b=$(cat f)"),
        ("{ read A; read B; } < f", "a=$(cat f) b=$(read B)"),
        ("exec 3< f; read -u 3 A", "a=$(cat f)"),
        ("exec 3<f 4<g; read A <&4; read -u3 B; exec 3<&-", "a=$(cat g) b=$(cat f)"),
        ('exec {fd}<"f"\nread -u $fd A', "a=$(cat f)"),
        ("exec < f; read", "r=$(cat f)"),
        ("read -u 9 A", "a=$(read -u 9 A)"),
        ("ask() { read -p $1 X; }; ask x\nA=$X; ask y\nB=$X", "a=$(read -p x X) b=$(read -p y X)"),
        ("while IFS= read -r l || [[ -n $l ]]; do A=$l; done < f", "a=$(cat f)"),
        ("while read -u 7 -r l || [[ -n $l ]]; do A=$l; done", "a=$(read -u 7 -r l)"),
        ("read -p 'which? ' A B", "a=$(read -p which?  A B) b=$(read -p which?  A B)"),
        ("set -eu; mapfile -t X < f; A=${X[1]} B=${#X[@]}", "a=$(cat f) b=$(cat f)"),
        ('readarray X < f; i=2; A="it\'s ${X[i]}" B="${X[-1]}"', "a=it's $(cat f) b=$(cat f)"),
        ("mapfile -t -s 1 X < f; A=${X[0]} B=${X[*]:1:2}", "a=$(mapfile -t -s 1 X) b=$(mapfile -t -s 1 X)"),
        ("X=($(cat f)); A=${X[1]} B=${#X[*]}", "a=$(cat f) b=$(cat f)"),
        ("read -ra X < f; A=${X[0]} B=${X[3]}", "a=$(cat f) b=$(cat f)"),
        ("X=$(cat f); A=${#X} B=${X%?}", "a=$(cat f) b=$(...)"),
        ("f() { local A; read A; B=$A; }; f < f", "b=$(cat f)"),
    ],
)
def test_everything_that_is_filled_from_a_file_is_a_hole(lines: str, holes: str) -> None:
    script = f'{lines}\n{MAIN} one=1 ${{A:+"a=$A"}} ${{B:+b=$B}} ${{REPLY:+r=$REPLY}}'
    found = command_of_script(script, [], {"HOME": "/h"})
    assert found.words == ("one=1",) and " ".join(each.text for each in found.holes) == holes


@pytest.mark.parametrize(
    "lines",
    [
        'read -r A B <<< "x y z"',
        "IFS=: read -r A B <<< 'x:y z'",
        'read -r A C <<< "x $(cat f)"; B="y z"',
        "mapfile -t X <<< $'x\ny z'; A=${X[0]} B=${X[-1]}",
        "exec 3<<< $'x\ny z'; read -u 3 A; read -u 3 B",
        "while IFS== read -r k v; do printf -v $k %s \"$v\"; done <<< $'A=x\nB=y z'",
        "while IFS= read -r l || [[ -n $l ]]; do K+=(\"$l\"); done < <(printf 'x\\ny z'); A=${K[0]} B=${K[1]} S=$l${K[2]}",
        "while mapfile -n 1 -t X && [[ -n $X ]]; do K+=(\"$X\"); done <<< $'x\\ny z'; A=${K[0]} B=${K[1]}",
        "read S <<< ''; while read -r A B && [[ -z $A ]]; do S+=$A; done <<< $'\\n\\nx y z'",
        "mapfile -t X <<< ''; A=x${X[0]} B='y z'",
        "X=(x 'y z'); A=${X[0]} B=${X[${#X[@]}-1]}",
        "V='x y z'; A=${V:0:1} B=${V:2:${#V}}",
        "read -r A < f; mapfile X < g; read -r -d '' A B <<END\nx y z\nEND",
    ],
)
def test_what_a_script_reads_from_itself_is_known(lines: str) -> None:
    found = command_of_script(f'{lines}\n{MAIN} a=$A$S "b=$B"', [], {"HOME": "/h"})
    assert found.words == ("a=x", "b=y z") and found.holes == ()


@pytest.mark.parametrize(
    "lines",
    [
        'while IFS== read -r k v; do export "$k=$v"; done < .env',
        "mapfile -t X < .env; TP=$((${#X[@]} / 2))",
        "TP=$(($(nproc) / 2))",
    ],
)
def test_a_variable_that_bash_cannot_set_is_told(lines: str) -> None:
    found = command_of_script(f"{lines}\n{MAIN} a=${{TP:-1}}", [], {"HOME": "/h"})
    assert found.holes and all(hole.text.startswith("bash: ") and "$(" in hole.text for hole in found.holes)


def test_where_the_output_goes_may_have_spaces() -> None:
    for target in ('"my $A.log"', "logs/$(date +%F).log", "${A:-my log}", "'a b'/c"):
        assert words(f"{MAIN} a=1 > {target} 2>&1") == ("a=1",)


def test_a_command_in_the_background_is_read_to_its_end() -> None:
    many = tuple(f"key{number}=1" for number in range(60))
    assert words(f"nohup {MAIN} {' '.join(many)} > run.log 2>&1 &") == many


def test_branches_are_those_of_bash() -> None:
    script = f'case "${{E:-vllm}}" in sglang) A=(x=1);; *) A=(x=2);; esac\nif [ "$1" = go ]; then shift; {MAIN} "${{A[@]}}" "$@"; fi'
    assert words(script, "go", "y=3") == ("x=2", "y=3")
    assert words(script, "go", E="sglang") == ("x=1",)
    with pytest.raises(ConfigError, match="no command of the script"):
        words(script)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("python3 -m verl.trainer.main_generation a=1", "another trainer"),
        (f"{MAIN} a=1\n{MAIN} a=2", "2 commands"),
        (f"set -u\n{MAIN} a=$NOWHERE", "NOWHERE: unbound variable.; set what it asks for"),
        ("echo nothing", "main_ppo; give its command after --"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(script: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        words(script)


def test_words_of_a_command_or_overrides_alone() -> None:
    given = ["nohup", "python3", "-u", "-m", "verl.trainer.main_ppo", "a=1", "+b=2"]
    assert command_of_words(given).words == command_of_words(["a=1", "+b=2"]).words == ("a=1", "+b=2")
    for wrong in ([], ["python3", "train.py"]):
        with pytest.raises(ConfigError, match="no arguments of verl"):
            command_of_words(wrong)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"echo a=1 'b=x' | xargs {MAIN} c=3", "c=3 a=1 b=x"),
        (f"A=(a=1 'b=x y'); printf '%s\\0' \"${{A[@]}}\" | nohup xargs -0 {MAIN} c=3", "c=3 a=1 b=x y"),
        (f"A=(a=1 'b=x y'); printf '%s\\n' \"${{A[@]}}\" | command xargs -r -d '\\n' {MAIN}", "a=1 b=x y"),
        (f'xargs -t {MAIN} c=3 <<EOF\na=1\n"b=x y" d=\\\'\nEOF', "c=3 a=1 b=x y d='"),
        (f"cat <<'EOF' | xargs {MAIN}\na=1\nb=2\nEOF", "a=1 b=2"),
        (f"echo 7b | xargs -I{{}} {MAIN} model={{}} c={{}}", "model=7b c=7b"),
        (f"echo | xargs {MAIN} c=3", "c=3"),
        (f"echo a=1 | xargs -I{{}} bash -c '{MAIN} {{}} c=3'", "a=1 c=3"),
        (f"xargs --null --max-args=9 {MAIN} c=3 <<< 'a=x y'", "c=3 a=x y\n"),
    ],
)
def test_xargs_adds_what_it_reads(script: str, expected: str) -> None:
    found = command_of_script(f"set -eu\n{script}", [], {"HOME": "/h"})
    assert (" ".join(found.words), found.holes) == (expected, ())


@pytest.mark.parametrize(
    ("script", "hole"),
    [
        (f"cat args.txt | xargs {MAIN} c=3", "$(cat args.txt)"),
        (f"xargs {MAIN} c=3 < args.txt", "$(cat args.txt)"),
        (f"grep -v '^#' args.txt | xargs -d '\\n' {MAIN} c=3 2>&1 | tee log", "$(grep -v ^# args.txt)"),
        (f"echo a=$(cat n) | xargs {MAIN} c=3", "a=$(cat n)"),
        (f"xargs -a args.txt {MAIN} c=3", f"$(xargs -a args.txt {MAIN} c=3)"),
        (f"xargs -L 1 {MAIN} c=3 <<< a=1", f"$(xargs -L 1 {MAIN} c=3)"),
        (f'echo "a=\'1" | xargs {MAIN} c=3', f"$(xargs {MAIN} c=3)"),
    ],
)
def test_what_xargs_reads_and_nobody_knows_is_named(script: str, hole: str) -> None:
    found = command_of_script(script, [], {"HOME": "/h"})
    assert found.words == ("c=3",) and [each.text for each in found.holes] == [hole]


def test_xargs_may_start_several_commands() -> None:
    for xargs in ("xargs -n1", "xargs -I{}"):
        with pytest.raises(ConfigError, match="2 commands"):
            words(f"printf 'a=1\\na=2\\n' | {xargs} {MAIN}")
    with pytest.raises(ConfigError, match="100 commands"):
        words(f"for ((i = 0; i < 30000; i++)); do echo $i; done | xargs -n1 {MAIN}")


def test_a_here_document_is_known_behind_cat() -> None:
    document = "cat <<'EOF'\na=1\nb=2\nEOF\n"
    found = command_of_script(f"set -eu\nA=$({document})\n{MAIN} $A $(cat - <<< c=3)", [], {"HOME": "/h"})
    assert found.words == ("a=1", "b=2", "c=3") and found.holes == ()
    found = command_of_script(f"A=$(cat)\nB=$(ls | cat)\n{MAIN} a=$A b=$B", [], {"HOME": "/h"})
    assert [hole.text for hole in found.holes] == ["a=$(cat)", "b=$(ls)"]


@pytest.mark.parametrize(
    "python", ["/opt/conda/bin/python3.11 -u", '"$CONDA_PREFIX/bin/python"', "$PYTHON \\\n ", "nohup ~/v/bin/python"]
)
def test_the_python_of_the_command_may_have_any_path(python: str) -> None:
    script = f"set -e\nPYTHON=/usr/bin/python3\n{python} -m verl.trainer.main_ppo \\\n  a=1 2>&1 | tee log"
    assert words(script, CONDA_PREFIX="/c") == ("a=1",)


@pytest.mark.parametrize("line", ["exec > >(tee -a log) 2>&1", 'exec &> >(tee "$(date +%F).log")', ": > >(cat)"])
def test_output_may_go_to_another_command(line: str) -> None:
    assert words(f"set -e\n{line}\n{MAIN} a=1 2> >(tee log)") == ("a=1",)


def test_the_time_to_read_a_script_grows_with_its_length_alone() -> None:
    def seconds(count: int, part: str) -> float:
        began = time.process_time()
        shell_script._without_redirections(part * count)
        return time.process_time() - began

    for part in ("(", "[[ ", "-a ", "> >(", "a[1"):
        assert seconds(8_000, part) < 16 * max(seconds(2_000, part), 0.02), part


@pytest.mark.parametrize("shell", ["bash -c", "srun --nodes=1 bash -lc", "ssh -t host", "docker exec c sh -c"])
def test_a_command_in_a_text_for_another_shell(shell: str) -> None:
    assert words(f"N=8\n{shell} \"cd /verl && {MAIN} \\\n  n=$N a='x y' > log\"") == ("n=8", "a=x y")
    with pytest.raises(ConfigError, match="text for another shell; save that text as a script"):
        words(f"N=8\n{shell} '{MAIN} n=$N'")


@pytest.mark.parametrize("end", ["\\ ", "\\\n  # b.b=2 \\", ""])
def test_an_override_after_the_end_of_the_command_is_told(end: str) -> None:
    found = command_of_script(f"{MAIN} \\\n  a.a=1 {end}\n  +c.lr=3 \\\n  d=4", [], {"HOME": "/h"})
    assert "a.a=1" in found.words and not {"+c.lr=3", "d=4"} & {*found.words}
    assert [(hole.text, "does not reach verl" in hole.why) for hole in found.holes] == [("+c.lr=3", True)]


def test_the_time_that_a_command_took_is_no_error() -> None:
    assert command_of_script(f"time {MAIN} a=1", [], {"HOME": "/h"}).not_run == ()
