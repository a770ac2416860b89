"""``dualpath COMMAND``: parse, call, print. One file a command; see ``dualpath --help``."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer
from typer.exceptions import TyperException

from dualpath import __version__
from dualpath.cli.demo import demo_command
from dualpath.cli.doctor import doctor_command
from dualpath.cli.engine import engine_command
from dualpath.cli.profile import profile_command
from dualpath.cli.replay import replay_command
from dualpath.cli.serve import serve_command
from dualpath.cli.store import store_app
from dualpath.cli.trace import trace_app
from dualpath.cli.up import up_command
from dualpath.config import ConfigError

EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 130

app = typer.Typer(
    name="dualpath",
    help="Agents served by vLLM prefill and decode pools whose KV-cache lives on storage.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would swallow the defaults, which stand in square brackets
    add_completion=False,
)
app.command("up")(up_command)
app.command("serve")(serve_command)
app.command("engine")(engine_command)
app.command("replay")(replay_command)
app.command("profile")(profile_command)
app.command("demo")(demo_command)
app.command("doctor")(doctor_command)
app.add_typer(trace_app, name="trace")
app.add_typer(store_app, name="store")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dualpath {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Options of the program itself."""


def run(arguments: list[str]) -> int:
    """Run one command; its exit status. Bad input is one line on stderr and status 2."""
    try:
        status = app(arguments or ["--help"], prog_name="dualpath", standalone_mode=False)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except TyperException as error:
        print(_usage_line(error), file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return status if isinstance(status, int) else 0


def _usage_line(error: TyperException) -> str:
    """Wrong options in one line; a group called without a command shows its help."""
    text = error.format_message()
    return text if text.lstrip().startswith("Usage:") else "error: " + " ".join(text.split())


def main() -> None:
    """Entry point of the ``dualpath`` script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
