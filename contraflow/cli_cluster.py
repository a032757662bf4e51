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


@eks.command("versions")
def eks_versions(
    image: Annotated[str, typer.Option(help="gpu or cpu: which image this should be")] = "gpu",
    as_json: Annotated[bool, typer.Option("--json", help="what is loaded, for programs")] = False,
) -> None:
    """Compare what is loaded here with what images are made of; exit code 1 if anything differs or is known to fail."""
    import json

    from contraflow.cluster.loaded import loaded_versions
    from contraflow.cluster.versions import IN_IMAGE, bad_pairs, differences
    from contraflow.errors import ConfigError

    if image not in IN_IMAGE:
        raise ConfigError(f"--image {image!r}: there are {', '.join(IN_IMAGE)}")
    found = loaded_versions()
    wrong = [*differences(found, image), *bad_pairs(found)]
    if as_json:
        typer.echo(json.dumps({"loaded": found, "wrong": wrong}, indent=1))
    else:
        typer.echo("\n".join(wrong) or f"the versions of the {image} image: {found}")
    if wrong:
        raise typer.Exit(1)


def plan(
    recipe: Annotated[
        Path, typer.Argument(help="a recipe (TOML), such as recipes/eks_8_nodes.toml", show_default=False)
    ],
    config: Annotated[Path | None, typer.Option(help="config.json of the model, if not the recipe's")] = None,
    machines: Annotated[str, typer.Option(help="TYPE:NODES in place of cluster.pools, as p5en.48xlarge:16")] = "",
    prompt: Annotated[int, typer.Option(help="tokens of a mean prompt; 0: what the context leaves")] = 0,
    answer: Annotated[int, typer.Option(help="tokens of a mean answer; 0: rollout.max_new_tokens")] = 0,
    factors: Annotated[Path | None, typer.Option(help="calibration, as bench/planner.py writes it")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; may be given many times", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same for programs")] = False,
) -> None:
    """Say how a run's nodes are best used: what fits, how fast layouts are, the split of the pools, cost, and why."""
    import msgspec

    from contraflow.balance.plan import lines, read_plan

    made = read_plan(
        recipe,
        overrides or [],
        config=config,
        machines=machines,
        prompt=prompt,
        answer=answer,
        factors=factors,
    )
    typer.echo(msgspec.json.format(msgspec.json.encode(made)).decode() if as_json else "\n".join(lines(made)))
