# shell_script.py runs this before a user's script, in a restricted bash with an empty PATH: restricted bash writes no file and
# starts nothing that has a slash in its name, and with an empty PATH no other command is found. For a command that it does not
# find, bash calls command_not_found_handle with the expanded words. It records them to the file descriptor RECORD_FD: before each
# word the id of the process that bash forks for a command, so that the commands of a pipe do not mix; \1 ends a command.
# What the command would have printed is unknown. It prints a hole in its place, that id between \2 and \3, which ends up in
# the words that depend on the output. The id's digits are control characters, from \016 on: a script that takes the digits out of
# the output, or the letters, must not find any.

# set -x writes here, where nobody reads. Errors of bash stay apart.
BASH_XTRACEFD=TRACE_FD
TIMEFORMAT=  # time prints nothing

# Builtins that write files, reach other processes, or raise the limits of this one. Restricted bash does not let a script enable
# them again. Before 5.2 it would let a script choose the file that HISTFILESIZE cuts.
enable -n history fc kill ulimit
readonly HISTFILE

# `set -x` in `python3 ... 2>&1 | tee LOG` writes into a pipe that nothing reads.
trap '' PIPE

command_not_found_handle() {
    local word id= at
    for word; do builtin printf '%s:%s\0' "$BASHPID" "$word" >&RECORD_FD; done
    # What xargs would read becomes words of its command. \4 marks it.
    case " $* " in *' xargs '*)
        while IFS= builtin read -r -d '' word || [[ -n $word ]]; do
            builtin printf '%s:\4%s\0' "$BASHPID" "$word" >&RECORD_FD
        done ;;
    esac
    builtin printf '%s:\1\0' "$BASHPID" >&RECORD_FD
    # These ask what the machine has. They print nothing and fail, as they do on a machine that does not have it.
    case "$1 $*" in *python*' -c '*print*) ;; *python*' -c '* | 'which '* | 'npu-smi '* | 'rocm-smi '*) return 1 ;; esac
    for ((at = 0; at < ${#BASHPID}; at++)); do builtin printf -v id '%s\\x%x' "$id" $((14 + ${BASHPID:at:1})); done
    builtin printf '\2%b\3\n' "$id" 2>&TRACE_FD  # nobody may read it
}

# The commands that have a result: experiments are named by the date, and files by the folder of the script.
dirname() { case "${1%/}" in */*) builtin printf '%s\n' "${1%/*}" ;; *) builtin printf '.\n' ;; esac; }
basename() { local name=${1%/}; name=${name##*/}; builtin printf '%s\n' "${name%"${2-}"}"; }
date() { case "${1-}" in +*) builtin printf "%(${1#+})T\n" -1 ;; *) builtin printf '%(%c)T\n' -1 ;; esac; }

# What cat is given, as by a here-document, is known; what a file holds is not.
cat() {
    local __text=
    [[ $# != 0 && $* != - ]] || IFS= builtin read -r -d '' __text || :
    if [[ -n $__text ]]; then builtin printf '%s' "$__text" 2>&TRACE_FD; else command_not_found_handle cat "$@"; fi
}

# Builtins that restricted bash refuses, or that would end the script before its command.
cd() { :; }
exec() { "$@"; }
kill() { :; }
history() { :; }
hash() { return 1; }
source() { command_not_found_handle source "$@"; }
.() { command_not_found_handle source "$@"; }

# What stands in a file that was not read, or what somebody would have typed, is unknown, and so is all that comes after it.
# A read that gives nothing found the end of such input, or a file that is not open here. Only where it had given something
# before, as in a loop, is that the end, for which the loop waits.
declare -A read_at=()
read() {
    local OPTIND=1 OPTARG __option __array= __name __all= __hole= __status=0 __words=("$@") __here="${BASH_LINENO[*]} $*"
    while builtin getopts :ersEa:d:i:n:N:p:t:u: __option; do [[ $__option != a ]] || __array=$OPTARG; done
    shift $((OPTIND - 1))
    [[ -z $__array && $# != 0 ]] || builtin set -- "${__array:-REPLY}"
    for __name; do builtin printf -v "$__name" ''; done  # a file that is not open changes nothing
    builtin read "${__words[@]}" || __status=$?
    for __name; do __all+=${!__name-}; done
    [[ $__status == 0 || -n $__all || -n ${read_at[$__here]-} ]] || __hole=$(command_not_found_handle read "${__words[@]}")
    read_at[$__here]=1
    for __name; do
        [[ ${!__name-} != *[$'\2\3']* ]] || __hole=${!__name}
        [[ -z $__hole ]] || builtin printf -v "$__name" %s "$__hole"
    done
    return $__status
}
mapfile() {
    local OPTIND=1 OPTARG __option __status=0 __here="${BASH_LINENO[*]} $*"
    builtin mapfile "$@" || __status=$?
    while builtin getopts :td:n:O:s:u:C:c: __option; do :; done
    local -n __array=${!OPTIND-MAPFILE}
    [[ ${#__array[@]} != 0 || -n ${read_at[$__here]-} ]] || __array=("$(command_not_found_handle mapfile "$@")")
    read_at[$__here]=1
    return $__status
}
readarray() { mapfile "$@"; }

# hole_or TEXT WORDS ... prints the first of the words with a hole, or the text. It stands where words or letters are counted.
hole_or() {
    local __text=$1 __word
    shift
    for __word; do case $__word in *[$'\2\3']*) __text=$__word && break ;; esac; done
    builtin printf '%s' "$__text"
}
