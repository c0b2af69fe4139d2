"""Print a shell script for TAB completion: of commands, recipes, groups, keys and files (bash, zsh, fish).

toolkit completion bash|zsh|fish

  bash   source <(toolkit completion bash)     in ~/.bashrc
  zsh    source <(toolkit completion zsh)      in ~/.zshrc, after compinit
  fish   toolkit completion fish | source      in ~/.config/fish/config.fish

The script asks `toolkit --complete LINE`, which loads no torch.
"""

from toolkit.messages import ConfigError, choose_language, tr

# A candidate is a whole word, as the toolkit takes it. One that ends with = . or / is not the end of the word.
SCRIPTS = {
    # bash has cut the word at = and : (COMP_WORDBREAKS) and wants the part behind the last of them.
    "bash": r"""_toolkit() {
    local line="${COMP_LINE:0:COMP_POINT}" candidate
    local word="${line##*[[:space:]]}" && local last="${word##*[=:]}"
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate:${#word}-${#last}}")
    done < <("$1" --complete "$line" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
}
complete -F _toolkit toolkit
""",
    "zsh": r"""#compdef toolkit
_toolkit() {
    local -a found=(${(f)"$(${words[1]} --complete "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)"})
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
    (( $#found ))
}
compdef _toolkit toolkit
""",
    "fish": r"""function __toolkit_complete
    set -l words (commandline -opc) (commandline -ct)
    $words[1] --complete (string join ' ' -- $words) 2>/dev/null
end
complete -c toolkit -f -a '(__toolkit_complete)'
""",
}


def run(words: list[str]) -> None:
    """Print the script."""
    shell = " ".join(choose_language(words))
    if shell not in SCRIPTS:
        raise ConfigError(tr("name one shell: toolkit completion bash|zsh|fish"))
    print(SCRIPTS[shell], end="")
