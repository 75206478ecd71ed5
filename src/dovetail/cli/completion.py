"""Print a script that completes verbs, flags and presets in a shell.

eval "$(dovetail completion bash)"                                          in ~/.bashrc
eval "$(dovetail completion zsh)"                                           in ~/.zshrc, after compinit
dovetail completion fish > ~/.config/fish/completions/dovetail.fish
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator

import tyro

from dovetail.core.errors import UsageError
from dovetail.core.suggest import names_or_nearest

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


@dc.dataclass
class Command:
    """The shell."""

    shell: tyro.conf.Positional[str]
    """bash, zsh or fish."""
    json: bool = False
    """Print the verbs with their flags as one JSON object instead."""

    def run(self) -> int:
        """Print the script."""
        from dovetail.cli.output import print_json

        if self.shell not in SCRIPTS:
            known = names_or_nearest(self.shell, SCRIPTS, "shells")
            raise UsageError(f"completion: {self.shell!r} is not a shell that Dovetail completes in; {known}")
        words: dict[str, list[str]] = {}
        for verb, flags, presets in _words():
            first, *second = verb.split()
            words[first] = list(dict.fromkeys([*words.get(first, []), *second, *flags, *presets]))
        if self.json:
            print_json({"shell": self.shell, "words": words})
        else:
            print(SCRIPTS[self.shell](words), end="")
        return 0


def _words() -> Iterator[tuple[str, list[str], list[str]]]:
    """(verb, its flags, the presets where it takes a spec)."""
    from dovetail.cli import VERBS, module_of
    from dovetail.cli.flags import flag_names, takes_spec
    from dovetail.disk.presets import preset_names

    for verb in VERBS:
        command = module_of(verb).Command
        presets = list(preset_names()) if takes_spec(command) else []
        yield verb, flag_names(command), [*presets, *(SCRIPTS if verb == "completion" else ())]


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
