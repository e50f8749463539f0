"""The command line of protocol 3: modules, verbs, what each takes, and the help that says so. Pure.

Source: 'MPS v3 Interface' r615. The usage lines are the grammar: a word in `[]` may be left out.
"""

from __future__ import annotations

from mpsd.sim.mps.views import Refused

_FORMAT = "[--format=<table|csv>[,noheader]]"
_LIMITS = "[--pinned-memory-limit=<limit>] [--active-thread-percentage=<pct>] [--client-priority=<p>]"

MODULES: dict[str, dict[str, str]] = {
    "server": {
        "create": "[<name>] [--uid=<n>] [--allowed-devices=<devices>] [--locality-domains=<true|false>]",
        "delete": "<name> [--force]",
        "list": f"[<name>] {_FORMAT}",
        "set": f"<name> [--uid=<n>] {_LIMITS} [--locality-domains=<true|false>]",
        "get": "<name> <field>",
    },
    "namespace": {
        "create": "<name> --server=<s>",
        "delete": "<name> --server=<s> [--force]",
        "list": f"[<name>] [--server=<s>] {_FORMAT}",
        "set": f"<name> --server=<s> {_LIMITS}",
        "get": "<name> <server> <field>",
    },
    "client": {
        "list": f"[--server=<s>] [--all] {_FORMAT}",
        "get": "<pid> <field>",
        "terminate": "<pid>",
    },
    "device": {"list": f"[--server=<s>] {_FORMAT}"},
    "feature": {
        "enable": "<memacct|context-share>",
        "disable": "<memacct|context-share>",
        "describe": f"[<name>] {_FORMAT}",
    },
    "memacct": {"set": "--audit_log=<true|false>", "describe": _FORMAT},
    "context-share": {},
}

QUIT = "quit"
"""What `-q` sends: the one command without a module."""

_FLAGS = """  -h, --help             this text
  -d, --daemon           start the control daemon in the background
  -f, --foreground       start the control daemon in the foreground
  -m, --multiuser        servers are root's and take clients of all users
  -a, --apply <file>     apply a configuration file at start
  -p, --protocol <2|3>   protocol of the control daemon
  -q, --quit             stop the control daemon and all servers
  -v, --version          print the version"""

_HELP_WORDS = ("help", "--help", "-h")


class Command:
    """One command, its words sorted out."""

    def __init__(
        self, module: str, verb: str, positionals: list[str], options: dict[str, str], flags: set[str]
    ) -> None:
        self.module = module
        self.verb = verb
        self.positionals = positionals
        self.options = options
        self.flags = flags

    def positional(self, index: int) -> str | None:
        return self.positionals[index] if index < len(self.positionals) else None


def name_of(words: list[str]) -> str:
    """A command by its name, `<module> <verb>`: what faults and messages call it."""
    return " ".join(words[:2])


def help_for(words: list[str]) -> str | None:
    """The help that these words ask for, None where they ask for none. No words: of the program."""
    if not words:
        modules = "\n".join(f"  {module:<15} {', '.join(verbs) or '-'}" for module, verbs in MODULES.items())
        return (
            "usage: nvidia-cuda-mps-control [options]\n"
            "       nvidia-cuda-mps-control <module> <verb> [arguments] [--key=value ...]\n"
            f"{_FLAGS}\nmodules and their verbs:\n{modules}"
        )
    verbs = MODULES.get(words[0])
    if verbs is None or words[-1] not in _HELP_WORDS or len(words) > 3:
        return None
    if len(words) == 2:
        return "\n".join(f"{words[0]} {verb} {usage}".rstrip() for verb, usage in verbs.items()) or words[0]
    return f"{words[0]} {words[1]} {verbs[words[1]]}" if len(words) == 3 and words[1] in verbs else None


def parse(words: list[str]) -> Command:
    """Sorts out the words of a command. Raises Refused: no such module, verb or option, too few words or too many."""
    module, verb, *rest = (*words, "", "")[: max(2, len(words))]
    if module not in MODULES:
        raise Refused(f"Unknown module '{module}'")
    usage = MODULES[module].get(verb)
    if usage is None:
        raise Refused(f"Unknown verb '{verb}' of module '{module}'")
    command = Command(module, verb, [], {}, set())
    for word in rest:
        key, equals, value = word.removeprefix("--").partition("=")
        if equals:
            command.options[key] = value
        elif word.startswith("--"):
            command.flags.add(key)
        else:
            command.positionals.append(word)
    _check(command, usage)
    return command


def _check(command: Command, usage: str) -> None:
    least = most = 0
    options: set[str] = set()
    flags: set[str] = set()
    for word in usage.split():
        text = word.lstrip("[").split("]")[0]
        if text.startswith("--"):
            key, equals, _ = text[2:].partition("=")
            (options if equals else flags).add(key)
            if word[0] != "[" and key not in command.options:
                raise Refused(f"Missing --{key}. Usage: {command.module} {command.verb} {usage}")
        else:
            most += 1
            least += word[0] != "["
    unknown = sorted((command.options.keys() - options) | (command.flags - flags))
    if unknown:
        raise Refused(f"Invalid option '{unknown[0]}'. Usage: {command.module} {command.verb} {usage}")
    if not least <= len(command.positionals) <= most:
        raise Refused(f"Invalid arguments. Usage: {command.module} {command.verb} {usage}")
