"""Print a script that completes verbs, flags and presets in a shell.

eval "$(dovetail completion bash)"                                          in ~/.bashrc
eval "$(dovetail completion zsh)"                                           in ~/.zshrc, after compinit
dovetail completion fish > ~/.config/fish/completions/dovetail.fish
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from dovetail.base.errors import UsageError, names_or_nearest
from dovetail.base.option import Option

BASH = """_dovetail() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{verbs}"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -f -- "$current"))
}}
complete -o filenames -F _dovetail dovetail
"""


Shell = Annotated[str, Option("bash, zsh or fish.", argument=True)]
Json = Annotated[bool, Option("Print the verbs with their flags as one JSON object instead.")]


def run(given: object, shell: Shell, json: Json = False) -> None:
    """Print the script."""
    from dovetail.cli.output import print_json

    if shell not in SCRIPTS:
        known = names_or_nearest(shell, SCRIPTS, "shells")
        raise UsageError(f"completion: {shell!r} is not a shell that Dovetail completes in; {known}")
    words: dict[str, list[str]] = {}
    for verb, flags, presets in _words():
        first, *second = verb.split()
        words[first] = list(dict.fromkeys([*words.get(first, []), *second, *flags, *presets]))
    if json:
        print_json({"shell": shell, "words": words})
    else:
        print(SCRIPTS[shell](words), end="")


def _words() -> Iterator[tuple[str, list[str], list[str]]]:
    """(verb, its flags, the presets where it takes a spec)."""
    from dovetail.cli import VERBS
    from dovetail.cli.command import command_of
    from dovetail.cli.parser import flag_names
    from dovetail.disk.presets import preset_names

    for name in VERBS:
        command = command_of(name)
        presets = list(preset_names()) if command.takes_spec else []
        yield name, flag_names(command.options), [*presets, *(SCRIPTS if name == "completion" else ())]


def bash(words: dict[str, list[str]]) -> str:
    """Return the script for bash."""
    cases = "\n".join(f'      {verb}) words="{" ".join(some)}" ;;' for verb, some in words.items())
    return BASH.format(verbs=" ".join(words), cases=cases)


def zsh(words: dict[str, list[str]]) -> str:
    """Return the script for zsh. In a completion function `words` is the line, so the verb is read before the name is taken."""
    cases = "\n".join(f"      {verb}) candidates=({' '.join(some)}) ;;" for verb, some in words.items())
    return f"""_dovetail() {{
  local verb="$words[2]"
  local -a candidates
  if (( CURRENT == 2 )); then
    candidates=({" ".join(words)})
  else
    case "$verb" in
{cases}
    esac
  fi
  compadd -- $candidates
  _files
}}
compdef _dovetail dovetail
"""


def fish(words: dict[str, list[str]]) -> str:
    """Return the script for fish."""
    lines = [f'complete -c dovetail -n __fish_use_subcommand -f -a "{" ".join(words)}"']
    for verb, some in words.items():
        inside = f"-n '__fish_seen_subcommand_from {verb}'"
        lines += [f"complete -c dovetail {inside} -l {flag[2:]}" for flag in some if flag.startswith("--")]
        names = " ".join(name for name in some if not name.startswith("-"))
        lines += [f'complete -c dovetail {inside} -a "{names}"'] if names else []
    return "\n".join(lines) + "\n"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
