"""Commands about clusters; part of the command line (cli.py), and like it imports nothing heavy at module level."""

from pathlib import Path
from typing import Annotated

import typer

eks = typer.Typer(help="Amazon EKS: the objects of a run's cluster.", no_args_is_help=True)


@eks.command("render")
def eks_render(
    recipe: Annotated[
        Path,
        typer.Argument(help="a recipe with a cluster section, such as recipes/eks_2_nodes.toml", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option(help="where the files go; eks/RECIPE if not given")] = None,
    nodes: Annotated[
        Path | None, typer.Option(help="what kubectl get nodes -o json wrote: ask for what these nodes offer")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; may be given many times", show_default=False)
    ] = None,
) -> None:
    """Write all objects of a recipe's cluster as files, and ORDER.md, which says what is applied when."""
    from contraflow.cluster.eks import render, write

    folder = out or Path("eks") / recipe.stem
    found = render(recipe, overrides or [], nodes)
    write(found, folder)
    typer.echo(f"wrote {folder}: {len(found)} files; nothing was started. Read {folder / 'ORDER.md'} first")
