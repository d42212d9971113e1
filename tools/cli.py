"""The console script `tokamak`: picks a subcommand and imports only that.

Each subcommand is a module with `main(arguments) -> exit code`.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from types import ModuleType

COMMANDS = {
    "serve": ("tools.serving", "start the engine and serve a model over HTTP"),
    "router": ("tools.router", "serve the model of many engines at one address"),
    "key": ("tools.key", "make the secret key of a cluster"),
    "top": ("tools.top.command", "monitor an engine that runs, hangs or died"),
    "ctl": ("tools.ctl", "inspect and control an engine"),
    "trace": ("tools.trace.command", "record a trace of all actors for Perfetto"),
    "chat": ("tools.chat.command", "chat with the model in the terminal"),
    "launch": ("tools.launch", "start Claude Code, Codex or opencode with the running engine"),
    "run-batch": ("tools.batch.command", "answer the requests in a batch file"),
    "pull": ("tools.pull", "download a model from a hub"),
    "calibrate": ("tools.calibrate.command", "write statistics of a model's activations, for better quantization"),
    "models": ("tools.models", "list or remove models on this machine"),
    "bench": ("", "measure"),
    "version": ("", "print the version"),
}
BENCHES = {
    "serve": ("tools.bench.serve", "load test of an OpenAI-compatible server"),
    "compare": ("tools.bench.compare", "compare several servers in interleaved rounds"),
    "step": ("tools.bench.step", "time of a step, op by op"),
    "shm": ("tools.bench.shm", "latency and throughput of the shared-memory queues"),
    "comm": ("tools.bench.comm", "collectives between ranks, compared with gloo"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the subcommand named by the arguments and return the exit code."""
    _open_closed_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    command, rest = _take(arguments, COMMANDS, "tokamak")
    if command == "version":
        return _print_version()
    if command == "bench":
        command, rest = _take(rest, BENCHES, "tokamak bench")
        name = BENCHES[command][0]
    else:
        name = COMMANDS[command][0]
    module = _import(name)
    try:
        code: int = module.main(rest)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe (`| head`) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _open_closed_streams() -> None:
    """Open /dev/null for standard streams that the caller closed (`>&-`). Otherwise the next opened file gets their numbers,
    and output of libraries and children goes into it."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor
            os.set_inheritable(opened, True)
            assert opened == descriptor, f"{name} is closed, and {descriptor} is not free"
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _import(name: str) -> ModuleType:
    """Import a module. Ctrl+C ends the process at once meanwhile, because some native modules crash if an exception interrupts
    their set-up."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_DFL if before is signal.default_int_handler else before)
    gc.disable()  # garbage collection takes a tenth of the time of an import, and modules leave no garbage
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()  # nor later, so the first collection can skip them too
        gc.enable()
        signal.signal(signal.SIGINT, before)


def _take(arguments: list[str], commands: dict[str, tuple[str, str]], program: str) -> tuple[str, list[str]]:
    """Return the subcommand and its arguments; without one, print the list and exit."""
    if arguments and arguments[0] in commands:
        return arguments[0], arguments[1:]
    lines = [f"usage: {program} COMMAND ...", ""]
    lines += [f"  {name:<9} {text}" for name, (_, text) in commands.items()]
    lines += ["", f"Run '{program} COMMAND --help' for the options of a command."]
    if arguments and arguments[0] in ("-h", "--help"):
        print("\n".join(lines))
        raise SystemExit(0)
    if arguments == ["--version"] and program == "tokamak":
        raise SystemExit(_print_version())
    cause = _cause(arguments[0], commands, program) if arguments else "no command is given"
    print(f"{program}: error: {cause}", *lines, sep="\n", file=sys.stderr)
    raise SystemExit(2)


def _cause(given: str, commands: dict[str, tuple[str, str]], program: str) -> str:
    """Return what is wrong with a word given as the command."""
    if given.startswith("-"):
        option = given.partition("=")[0][:100]
        return (
            f"option {option} is given before the command; put it after the command, as in `{program} "
            f"{next(iter(commands))} {option}`"
        )
    from engine.options.nearest import nearest

    close = nearest(given, commands)
    return f"unknown command {given[:100]!r}" + (f"; did you mean {close}?" if close else "")


def _print_version() -> int:
    from engine.installation import package_version

    print(f"tokamak {package_version()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
